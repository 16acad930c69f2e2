"""Documents from files, folders, JSON lines and the standard library."""

import json
import os
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.data.sources import find_corpus, stdlib_corpus


def lines(path: Path, *items: object) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items))
    return path


def test_files_folders_and_lines(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.py").write_text("print(1)\n")
    (folder / "b.txt").write_bytes(b"\xef\xbb\xbfwith\r\na mark")
    (folder / "empty.txt").write_text("")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    lines(folder / "c.jsonl", {"text": "one", "id": 7}, "", {"text": ""}, {"text": "two"})
    for hidden in (".git", "__pycache__"):
        (folder / hidden).mkdir()
        (folder / hidden / "x.txt").write_text("hidden")
    (folder / ".hidden.txt").write_text("hidden")
    single = tmp_path / "single.txt"
    single.write_text("single")

    corpus = find_corpus([str(folder), single])
    read: list[int] = []
    documents = list(corpus.texts(read.append))
    assert documents[-1] == "single"
    assert sorted(documents) == sorted(["print(1)\n", "with\r\na mark", "one", "two", "single"])
    assert documents.index("one") + 1 == documents.index("two")
    assert [each.path for each in corpus.skipped] == [folder / "picture.png"]
    assert sum(read) == corpus.num_bytes == sum(file.path.stat().st_size for file in corpus.files)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_folders_that_cannot_be_listed_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "closed").mkdir(parents=True)
    (folder / "closed" / "a.txt").write_text("closed")
    (folder / "b.txt").write_text("open")
    for above in [folder, *folder.parents][:5]:  # up to pytest's folder of all its runs
        above.chmod(above.stat().st_mode | 0o755)
    (folder / "closed").chmod(0o711)
    os.seteuid(65534)
    try:
        corpus = find_corpus([folder])
        assert list(corpus.texts()) == ["open"]
        assert [each.path for each in corpus.skipped] == [folder / "closed"]
        with pytest.raises(ConfigError, match=r"Cannot list .*closed: Permission denied"):
            find_corpus([folder / "closed"])
    finally:
        os.seteuid(0)


def test_the_order_of_a_folder_depends_on_its_names_alone(tmp_path: Path) -> None:
    names = [f"{number}.txt" for number in range(30)]
    orders = []
    for copy, order in (("a", names), ("b", names[::-1])):
        (tmp_path / copy).mkdir()
        for name in order:
            (tmp_path / copy / name).write_text(name)
        orders.append(list(find_corpus([tmp_path / copy]).texts()))
    assert orders[0] == orders[1]
    assert orders[0] != sorted(names), "the tail must be a sample, not the last in the alphabet"


@pytest.mark.parametrize(
    "bad",
    ["{", "[]", '{"txt": "a"}', '{"text": 1}', '"text"', "nonsense", '{"text": "\\ud800"}', "[" * 100_000],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str) -> None:
    path = lines(tmp_path / "bad.jsonl", {"text": "fine"}, bad)
    with pytest.raises(ConfigError) as refusal:
        list(find_corpus([path]).documents())
    assert f"{path}:2: " in str(refusal.value)


def test_bad_inputs_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"nowhere does not exist"):
        find_corpus([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match=r"No files in .*empty"):
        find_corpus([tmp_path / "empty"])
    with pytest.raises(ConfigError, match=r"binary\.txt is UTF-16"):
        list(find_corpus([binary]).documents())


def test_the_standard_library_is_a_real_corpus() -> None:
    corpus = stdlib_corpus()
    names = [file.path.name for file in corpus.files]
    folders = {part for file in corpus.files for part in file.path.parts[-3:-1]}
    assert {"argparse.py", "dataclasses.py", "heapq.py"} <= set(names)
    assert not folders & {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"}
    assert 200 < len(names) < 2000
    assert 4e6 < corpus.num_bytes < 3e7
    assert corpus.files == stdlib_corpus().files == find_corpus(["stdlib"]).files


def test_links_of_a_folder_that_lead_to_no_file_are_named(tmp_path: Path) -> None:
    """As DVC and git-annex leave them where a file was not fetched; a folder behind a link is not searched."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "b.txt").write_text("b")
    (folder / "a.txt").write_text("a")
    (folder / "file.txt").symlink_to(elsewhere / "b.txt")
    (folder / "more").symlink_to(elsewhere)
    (folder / "absent.md").symlink_to(elsewhere / "nowhere")
    corpus = find_corpus([folder])
    assert sorted(corpus.texts()) == ["a", "b"]
    reasons = {each.path.name: each.reason for each in corpus.skipped}
    assert reasons == {
        "absent.md": f"Cannot read {folder}/absent.md: No such file or directory.",
        "more": f"{folder}/more is a link to a folder, which is not followed: name that folder as an input.",
    }
    for name in ("rows.jsonl", "rows.parquet"):
        (folder / name).symlink_to(elsewhere / "nowhere")
        with pytest.raises(ConfigError, match=rf"Cannot read {folder}/{name}"):
            list(find_corpus([folder]).documents())
        (folder / name).unlink()
