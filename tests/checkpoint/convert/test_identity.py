"""The identity of weights: the same for every layout of them, another one for every change, and kept."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tk.checkpoint import Checkpoint, export_links, prepare_export, reshard
from tk.checkpoint.convert import identity as module
from tk.checkpoint.convert.identity import weights_identity
from tk.checkpoint.convert.plan import Tile
from tk.core.casts import Array
from tk.core.dtypes import BF16, FP32
from tk.core.errors import ShardCorrupt
from tk.core.layout import Layout
from tk.tests.checkpoint.saving import LLAMA

NAMES = [spec.name for spec in LLAMA]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache of one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tk" / "identities"


def identity_of(path: Path) -> str:
    return weights_identity(Checkpoint.open(path), NAMES)


@pytest.fixture
def plain(llama_step: Path, tmp_path: Path) -> Path:
    """A plain Hugging Face folder of the step."""
    return prepare_export(Checkpoint.open(llama_step), tmp_path / "plain", plain=True).run()


def test_every_layout_of_the_weights_has_the_identity_that_the_format_page_defines(
    llama_step: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ELEMENTS", 100)  # tensors are read in parts
    values = {name: array for path in plain.glob("*.safetensors") for name, array in load_file(path).items()}
    lines = []
    for name in sorted(NAMES):
        content = hashlib.sha256(values[name].view(torch.int16).numpy().tobytes()).hexdigest()
        lines.append(f"{name} BF16 {'x'.join(map(str, values[name].shape))} {content}\n")
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    again = reshard(llama_step, tmp_path / "again", layout=Layout(tp=4, pp=2))
    assert [identity_of(path) for path in (llama_step, plain, again)] == [expected] * 3


def test_one_changed_value_is_another_identity_although_the_first_is_kept(plain: Path, cache: Path) -> None:
    before = identity_of(plain)
    [kept] = cache.iterdir()
    assert kept.read_text() == before
    [path] = plain.glob("*.safetensors")
    values = load_file(path)
    values["model.norm.weight"].view(torch.int16)[3] ^= 1
    save_file(values, path)
    assert identity_of(plain) != before


def test_an_identity_is_computed_once(llama_step: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = identity_of(llama_step)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_computed", None)  # not called
        assert identity_of(llama_step) == found
    [kept] = cache.iterdir()
    kept.write_text("half of a")
    assert identity_of(llama_step) == found, "a damaged file of the cache is not believed"


def test_copies_with_the_same_values_have_the_identity_without_another_look_at_their_weights(
    llama_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = identity_of(llama_step)
    resharded = reshard(llama_step, tmp_path / "resharded", layout=Layout(tp=2), weights_only=True)
    copies = [
        resharded,
        reshard(resharded, tmp_path / "bf16", layout=Layout(), dtype=BF16),
        prepare_export(Checkpoint.open(resharded), tmp_path / "exported", plain=True).run(),
        export_links(Checkpoint.open(tmp_path / "bf16"), tmp_path / "linked"),
    ]
    monkeypatch.setattr(module, "_computed", None)  # not called
    assert [identity_of(path) for path in copies] == [found] * 4


def test_copies_with_other_values_or_dtypes_have_their_own_identity(llama_step: Path, tmp_path: Path) -> None:
    found = identity_of(llama_step)
    wide = reshard(llama_step, tmp_path / "wide", layout=Layout(), dtype=FP32)
    assert identity_of(wide) != found
    source = Checkpoint.open(llama_step)
    merged = replace(prepare_export(source, tmp_path / "merged", plain=True), change=_Flipped()).run()
    assert identity_of(merged) not in (found, identity_of(wide))


class _Flipped:
    """A change of all values: their last bit."""

    def changed(self, tile: Tile, values: Array) -> Array:
        return values ^ 1

    def require_unchanged(self) -> None:
        pass

    def facts(self) -> Mapping[str, Any]:
        return {}

    def sentence(self) -> str:
        return ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_without_a_place_to_keep_it_the_identity_is_computed_again(llama_step: Path, cache: Path) -> None:
    cache.parent.parent.mkdir()
    cache.parent.parent.chmod(0o500)
    assert identity_of(llama_step) == identity_of(llama_step)


def test_a_flipped_bit_is_found_while_the_weights_are_read(llama_step: Path) -> None:
    path = next(iter(sorted(llama_step.glob("model-*.safetensors"))))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardCorrupt):
        identity_of(llama_step)


def test_the_cache_of_a_folder_that_was_copied_over_is_not_believed(plain: Path, tmp_path: Path) -> None:
    before = identity_of(plain)
    other = Path(shutil.copytree(plain, tmp_path / "other"))
    [path] = other.glob("*.safetensors")
    values = load_file(path)
    save_file(values | {"model.norm.weight": values["model.norm.weight"] + 1}, path)
    shutil.copyfile(path, plain / path.name)  # the same size, and perhaps within a tick of the clock
    assert identity_of(plain) != before
