"""A command that a signal ends leaves no incomplete files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tk.cli.main import COMMANDS
from tk.cli.signals import exit_on_signals
from tk.core.layout import Layout
from tk.tests.checkpoint.saving import llama_table, save_step

SLOWLY = """
import signal, sys, time
number, code = map(int, sys.argv[1:3])
signal.signal(number, signal.SIG_DFL if code == 1 else signal.default_int_handler)  # nohup would ignore it
from tk.checkpoint.files import folders, storage
from tk.cli.main import main
write, remove = storage.pwrite, folders.remove_file
def write_one(*arguments):
    write(*arguments)
    print("writing", flush=True)
    time.sleep(60)
def remove_slowly(path):
    print("removing", flush=True)
    time.sleep(0.05)
    remove(path)
storage.pwrite, folders.remove_file = write_one, remove_slowly
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("number", "code", "command"),
    [
        (signal.SIGTERM, 1, "reshard --tp 1"),
        (signal.SIGHUP, 1, "export"),
        (signal.SIGINT, 130, "export --plain"),
    ],
)
def test_a_target_in_the_making_is_removed(tmp_path: Path, number: signal.Signals, code: int, command: str) -> None:
    """A second signal during the removal must not stop it."""
    save_step(tmp_path / "run", llama_table(layers=1), Layout(tp=2))
    name, *options = command.split()
    words = [name, str(tmp_path / "run"), str(tmp_path / "new"), *options]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, str(int(number)), str(code), *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "writing\n"
        assert len(os.listdir(tmp_path)) == 2
        process.send_signal(number)
        while process.stdout.readline() not in ("removing\n", ""):
            pass
        if code == 1:
            process.send_signal(number)
        assert process.wait(60) == code
    finally:
        process.kill()
        process.communicate()
    assert os.listdir(tmp_path) == ["run"]


def test_a_signal_that_is_ignored_stays_so() -> None:
    """nohup ignores signals."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(SystemExit, match="1"):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


WITHIN_EXEC = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup would ignore it
from tk.cli.signals import exit_on_signals
try:
    with exit_on_signals():
        exec("os.kill(os.getpid(), signal.SIGINT)")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_while_a_module_is_imported_gives_the_exit_code() -> None:
    """Python would end the process by the signal: dataclasses call `exec`, as this script does."""
    process = subprocess.run(
        [sys.executable, "-c", WITHIN_EXEC],
        timeout=60,
    )
    assert process.returncode == 130


WITHIN_FINALIZER = """
import os, signal, sys, time
number = int(sys.argv[1])  # nohup would ignore it, and a shell's background job
signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
from tk.cli.signals import exit_on_signals
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), number)
        time.sleep(0)
try:
    with exit_on_signals():
        Finalized()
        time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGHUP, 1), (signal.SIGINT, 130)])
def test_a_signal_within_a_finalizer_takes_effect_after_it(number: signal.Signals, code: int) -> None:
    """Python drops exceptions there, and in what imports do at their end."""
    command = [sys.executable, "-c", WITHIN_FINALIZER, str(int(number))]
    process = subprocess.run(command, timeout=55, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (code, "")


def test_every_command_exits_on_signals_except_those_that_handle_them() -> None:
    """`tk train` saves on a signal; `tk tokenizer` runs native code, which Python could not interrupt."""
    assert {name for name, entry in COMMANDS.items() if not entry.exits_on_signals} == {"train", "tokenizer"}
