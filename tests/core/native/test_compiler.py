"""The compiler: the one that $CC names, the system's, or the one in the package `ziglang`."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from tk.core.native import compiler, load_library
from tk.core.native.compiler import find_compilers
from tk.tests.core.native.sources import CountingCompiler, small_source

FAKE_ZIG = """
import os, sys
first, *arguments = sys.argv[1:]
assert first == "cc", first
target = arguments[:3]
with open({log!r}, "a") as log:
    print(*target, file=log)
assert target[0] == "-target" and target[1].endswith("-linux-gnu.2.17") and target[2].startswith("-mcpu="), target
assert os.environ["ZIG_GLOBAL_CACHE_DIR"] == os.getcwd()
os.environ["PATH"] = {path!r}
os.execvp({compiler[0]!r}, [*{compiler!r}, *arguments[3:]])
"""


def test_the_compiler_that_cc_names_is_first_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingCompiler(tmp_path, monkeypatch)
    monkeypatch.setenv("CC", f"{counting.path} -DEXTRA='a b'")
    found = list(find_compilers())
    assert found[0].command == (str(counting.path), "-DEXTRA=a b")
    assert len({os.path.realpath(each.command[0]) for each in found}) == len(found)  # cc and gcc are mostly one


@pytest.mark.parametrize("chosen", ["no-such-compiler -O1", "unbalanced 'quote"])
def test_a_cc_that_does_not_exist_is_named_and_passed_over(
    chosen: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    usual = next(find_compilers())
    monkeypatch.setenv("CC", chosen)
    assert next(find_compilers()) == usual
    assert chosen.split(" -")[0] in caplog.text


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_there_is_no_library(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_library(small_source(tmp_path)) is None
    assert load_library(small_source(tmp_path)) is None
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "no C compiler" in messages[0]
    assert "pip install 'ziglang>=" in messages[0]


def test_the_compiler_of_the_package_is_taken_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    real, path, log = list(next(find_compilers()).command), os.environ["PATH"], tmp_path / "log"
    request.getfixturevalue("no_compiler")
    (tmp_path / "packages" / "ziglang").mkdir(parents=True)
    (tmp_path / "packages" / "ziglang" / "__init__.py").touch()
    program = FAKE_ZIG.format(log=str(log), path=path, compiler=real)
    (tmp_path / "packages" / "ziglang" / "__main__.py").write_text(program)
    monkeypatch.delitem(sys.modules, "ziglang")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    library = load_library(small_source(tmp_path))
    assert library is not None
    assert (library.library.answer(), library.library.twice(4)) == (42, 8)
    assert library.compiler == "ziglang of unknown version"
    machine = os.uname().machine
    assert set(log.read_text().splitlines()) == {
        shlex.join(["-target", f"{machine}-linux-gnu.2.17", f"-mcpu={'x86_64' if machine == 'x86_64' else 'generic'}"])
    }


def test_a_compiler_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "never")
    before = f'case "$*" in *" -c "*) echo $$ > {tmp_path}/process; read line < {tmp_path}/never;; esac'
    CountingCompiler(tmp_path, monkeypatch, before)
    seconds = 1
    while not (tmp_path / "process").exists():  # on a busy machine a shell may begin after that time
        monkeypatch.setattr(compiler, "_TIME_LIMIT", float(seconds))
        messages = next(find_compilers()).run(["-O1", "-c", "answer.c"], tmp_path)
        assert messages == f"it did not end within {seconds} s"
        seconds *= 4
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)
