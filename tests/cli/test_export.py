"""`tk export` of adapters: a folder for peft, or the base with the adapter added, and what was lost on the way."""

import json
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.convert.identity import weights_identity
from tk.cli.main import main
from tk.core.layout import Layout
from tk.model.config import ModelConfig
from tk.model.lora.options import LoraOptions
from tk.model.registry import tensor_table
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.lora.peft_adapters import save_as_step


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ENTRIES["llama3"].make(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def run(tmp_path: Path, base: Path) -> Path:
    """The run folder of an adapter that knows its base, of two ranks."""
    names = [spec.name for spec in tensor_table(ModelConfig.from_folder(base)) if not spec.alias]
    options = LoraOptions(rank=2, alpha=1e-7, targets=("q_proj",))
    identity = weights_identity(Checkpoint.open(base), names)
    return save_as_step(tmp_path / "run", base, options, Layout(tp=2), identity=identity).parent


def errors(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_an_adapter_goes_to_peft_and_into_its_base(
    tmp_path: Path, base: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert main(["export", str(run), str(adapter), "--dry-run"]) == 0
    assert "  adapter_model.safetensors  " in capsys.readouterr().out
    assert not adapter.exists()
    assert main(["export", str(run), str(adapter), "--plain"]) == 0
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert main(["export", "--merge", str(run), str(merged)]) == 0
    said = capsys.readouterr()
    assert "unverified" not in said.err
    assert "% of the weights with an adapter kept their value: the sum was rounded away" in said.out
    assert Checkpoint.open(merged).verify().ok
    assert main(["export", "--merge", str(adapter), str(merged), "--force", "--plain", "--json"]) == 0
    said = capsys.readouterr()
    assert f"note: unverified: {adapter} does not say which weights it was trained on; those of {base} are" in said.err
    assert 0 < json.loads(said.out)["kept_elements"] <= json.loads(said.out)["adapted_elements"] == 3 * 64 * 64
    assert not (merged / "COMMIT").exists()
    assert Checkpoint.open(merged).config() == Checkpoint.open(base).config()


def test_another_base_is_taken_if_it_has_the_same_weights(
    tmp_path: Path, base: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = base.rename(tmp_path / "moved")
    assert main(["export", "--merge", str(run), str(tmp_path / "merged")]) == 3
    assert f"was trained on {base}, which does not open" in errors(capsys)
    assert main(["export", "--merge", str(run), str(tmp_path / "merged"), "--base", str(moved)]) == 0
    assert main(["export", str(run), str(tmp_path / "adapter"), "--base", str(moved)]) == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(moved)
    with (moved / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    assert main(["export", "--merge", str(run), str(tmp_path / "other"), "--base", str(moved)]) == 3
    assert "is an adapter of another base than" in errors(capsys)
    assert not (tmp_path / "other").exists()


def test_a_base_that_was_in_codes_is_named(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype, said in (("int8", True), ("bf16", False)):
        options = LoraOptions(rank=2, targets=("q_proj",))
        step = save_as_step(tmp_path / dtype, base, options, Layout(), trained_in=dtype)
        assert main(["export", "--merge", str(step), str(tmp_path / f"{dtype}-merged")]) == 0
        assert (f"note: {step} was trained beside weights in int8" in errors(capsys)) == said


def test_options_that_mean_nothing_are_refused(
    tmp_path: Path, base: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = str(tmp_path / "new")
    for words, code, said in (
        ([str(run), new, "--link"], 2, "--link cannot be combined with an adapter"),
        ([str(run), new, "--merge", "--link"], 2, "--link cannot be combined with an adapter"),
        ([str(base), new, "--base", str(base)], 2, "--base is for adapters"),
        ([str(base), new, "--merge"], 3, "holds a model, not an adapter of one"),
    ):
        assert main(["export", *words]) == code
        assert said in errors(capsys)
    assert not Path(new).exists()
