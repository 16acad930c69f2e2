"""`tk init`: what it writes is read as it is, explains every key, and trains by the commands that it prints."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from tk.cli.init_toml import EXPLANATIONS
from tk.cli.main import main
from tk.core.config import load_toml
from tk.core.process import module_command
from tk.tests.infer.serve.tiny_model import write_tiny_model
from tk.train.config.train_config import TrainConfig

CHATS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"A number: {n}."}]}
    for n in range(400)
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a text, rows, conversations and a model that has no chat template."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times.\n" * 400)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    rows = ({"prompt": row["messages"][0]["content"], "response": row["messages"][1]["content"]} for row in CHATS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return tmp_path


VARIANTS = {
    "stdlib": ("init",),
    "text": ("init", "--text", "book.txt"),
    "texts and a time": ("init", "--text", "book.txt", "--text", "book.txt", "--minutes", "600"),
    "a model on text": ("init", "--model", "model", "--text", "book.txt"),
    "a model on rows": ("init", "--model", "model", "--text", "rows.jsonl"),
    "a model on chats": ("init", "--model", "model", "--text", "chats.jsonl"),
    "an adapter": ("init", "--model", "model", "--text", "chats.jsonl", "--lora"),
}


def keys_of(toml: str) -> list[str]:
    """Returns the keys of a file as section.key, each of which must be alone on a line with its explanation."""
    found, section = [], ""
    for line in toml.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            match = re.fullmatch(r"(\w+) = .*\S {2,}# (.+)", line)
            assert match, line
            found.append(f"{section}.{match[1]}")
            assert match[2] == EXPLANATIONS[found[-1]]
    return found


@pytest.mark.parametrize("words", VARIANTS.values(), ids=VARIANTS)
def test_what_is_written_is_read_and_explained(
    words: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    said, written = capsys.readouterr(), (here / "mine.toml").read_text()
    load_toml(here / "mine.toml", TrainConfig)
    given = {f"{section}.{key}" for section, keys in tomllib.loads(written).items() for key in keys}
    assert sorted(keys_of(written)) == sorted(given)
    commands = said.err.split("Next:\n")[1].splitlines()
    assert said.out.splitlines()[-1].startswith("mine.toml: ")
    assert [line.removeprefix("#") for line in written.splitlines() if line.startswith("#   tk ")] == [
        f" {line}" for line in commands
    ]


def test_explanations_are_short_and_of_keys_that_exist() -> None:
    """They are of keys that exist; the one that only several GPUs have is in no variant."""
    assert all(len(text) < 90 and "\n" not in text for text in EXPLANATIONS.values())
    configured = {
        f"{section}.{key}" for section, field in TrainConfig.model_fields.items() for key in fields_of(field.annotation)
    }
    assert set(EXPLANATIONS) <= configured


def fields_of(section: object) -> set[str]:
    kinds = [section, *getattr(section, "__args__", ())]
    return {key for kind in kinds for key in getattr(kind, "model_fields", {})}


def test_nothing_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.toml").write_text("mine")
    assert main(("init",)) == 2
    assert "mine.toml exists already: choose another NAME" in capsys.readouterr().err
    assert (here / "mine.toml").read_text() == "mine"
    (here / "runs" / "other").mkdir(parents=True)
    assert main(("init", "other")) == 2
    assert "runs/other exists already" in capsys.readouterr().err
    assert not (here / "other.toml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("init", "--model", "model"), "--model needs --text"),
        (("init", "--lora"), "--lora needs --model"),
        (("init", "../up"), "becomes part of file names"),
        (("init", "--text", "chats.jsonl"), "continue a model: name one with --model"),
        (("init", "--text", "nowhere"), "nowhere does not exist"),
        (("init", "--text", "book.txt", "--minutes", "0"), "--minutes"),
    ],
)
def test_wrong_usage_says_what_would_be_right(
    words: tuple[str, ...], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not list(here.glob("*.toml"))


def test_a_model_with_a_template_keeps_its_tokenizer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert main(("init", "--model", "model", "--text", "chats.jsonl")) == 0
    assert "--tokenizer model --out mine-tokens" in capsys.readouterr().err
    assert load_toml(here / "mine.toml", TrainConfig).data.tokenizer is None
    assert not (here / "mine-tokenizer").exists()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", ["stdlib", "text", "a model on text", "a model on rows", "a model on chats", "an adapter"]
)
def test_the_printed_commands_train(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(VARIANTS[name]) == 0
    commands = [line.strip() for line in capsys.readouterr().err.split("Next:\n")[1].splitlines()]
    assert commands[-1].startswith("tk serve ")
    for command in commands[:-1]:
        words = shlex.split(command)[1:]
        few = ("--set", "train.steps=3", "--set", "optimizer.warmup_steps=1") if words[0] == "train" else ()
        done = subprocess.run(module_command("tk", [*words, *few]), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert list((here / "runs" / "mine").glob("step-*"))
