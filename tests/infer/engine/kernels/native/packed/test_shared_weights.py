"""Packed weights from a folder: the bits of those that are packed at start, and never another model's."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tk.core.casts import Array
from tk.core.errors import ConfigError
from tk.infer import LLM, SamplingParams
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kernels.native.model_runner import NativeRunner
from tk.infer.engine.kernels.native.packed import shared_weights
from tk.infer.engine.kernels.native.packed.folder import PackedFolder
from tk.infer.engine.kernels.native.packing import PackedWeights
from tk.infer.engine.worker.worker import load
from tk.tests.child_processes import child_ids
from tk.tests.infer.engine.kernels.native.running import BEST, NUM_BLOCKS, logits
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.model.architectures import ENTRIES, VOCAB

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()


def job(model: Path, packed: Path | str, dtype: str = "bf16", weight_dtype: str = "", kv_dtype: str = "int4") -> Job:
    return Job(
        *(str(model), "native", dtype, kv_dtype, NUM_BLOCKS, 0, BLOCK_SIZE, 512),
        instruction_set=BEST,
        weight_dtype=weight_dtype,
        packed=str(packed),
    )


def results(jobs: list[Job]) -> list[Array]:
    """Returns the logits of one sequence on the ranks of a model, each a thread of this process."""

    def work(each: Job) -> Array:
        made = load(each)
        assert isinstance(made, NativeRunner)
        found = logits(made, TOKENS, (7,))
        made.close()
        return found

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(work, jobs))


def never(*_: object) -> None:
    raise AssertionError("weights are packed")


@pytest.mark.parametrize(
    ("name", "dtype", "weight_dtype"),
    [
        ("llama3", "bf16", ""),
        ("qwen2", "fp32", "int8"),
        pytest.param("qwen2_moe", "bf16", "int4", marks=pytest.mark.matrix),
        pytest.param("gpt2 untied", "fp16", "", marks=pytest.mark.matrix),
        pytest.param("glm4_moe", "bf16", "int8", marks=pytest.mark.matrix),
    ],
)
def test_every_start_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, weight_dtype: str
) -> None:
    """Without a folder, at the start that packs, and at one that must not pack."""
    ENTRIES[name].make(tmp_path / "model")
    plain, first = (
        results([job(tmp_path / "model", packed, dtype, weight_dtype)])[0] for packed in ("", tmp_path / "packed")
    )
    monkeypatch.setattr(PackedWeights, "take", never)
    later = results([job(tmp_path / "model", tmp_path / "packed", dtype, weight_dtype)])[0]
    np.testing.assert_array_equal(first, plain)
    np.testing.assert_array_equal(later, plain)


def ranks(model: Path, packed: Path | str, store: Path) -> list[Job]:
    return [replace(job(model, packed), tp=2, rank=rank, store=str(store)) for rank in range(2)]


def test_ranks_have_files_of_their_own_and_pack_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the file of one is lost, both read the checkpoint again."""
    model, packed = tmp_path / "model", tmp_path / "packed"
    ENTRIES["llama3"].make(model)
    plain = results(ranks(model, "", tmp_path / "a"))
    for start in ("b", "c"):
        for found, expected in zip(results(ranks(model, packed, tmp_path / start)), plain, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert sorted(path.name.split(".", 1)[1] for path in packed.iterdir()) == ["0.packed", "1.packed", "lock"]
        next(packed.glob("*.1.packed")).unlink()
    results(ranks(model, packed, tmp_path / "d"))
    monkeypatch.setattr(PackedWeights, "take", never)
    results(ranks(model, packed, tmp_path / "e"))


@pytest.mark.parametrize("change", ["weights", "dtype", "weight_dtype", "code", "layout"])
def test_whatever_decides_the_bytes_decides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    model, packed = tmp_path / "model", tmp_path / "packed"
    ENTRIES["llama3"].make(model)
    results([job(model, packed)])
    options: dict[str, Any] = {"dtype": {"dtype": "fp16"}, "weight_dtype": {"weight_dtype": "int8"}}.get(change, {})
    if change == "weights":
        values = load_file(model / "model.safetensors")
        values["model.norm.weight"] = -values["model.norm.weight"]
        save_file(values, model / "model.safetensors", metadata={"format": "pt"})
    elif change == "code":
        changed = tmp_path / "packing.py"
        changed.write_text("")
        monkeypatch.setattr(shared_weights, "_CODE", (*shared_weights._CODE, changed))
        changed.write_text("# another version")
    elif change == "layout":
        jobs = ranks(model, packed, tmp_path / "store")
        np.testing.assert_array_equal(results(jobs)[0], results(ranks(model, "", tmp_path / "other"))[0])
    if change != "layout":
        expected = results([replace(job(model, ""), **options)])[0]
        np.testing.assert_array_equal(results([replace(job(model, packed), **options)])[0], expected)
    assert len({path.name.partition(".")[0] for path in packed.iterdir()}) == 2


def test_a_damaged_file_is_packed_again(tmp_path: Path) -> None:
    model, packed = tmp_path / "model", tmp_path / "packed"
    ENTRIES["llama3"].make(model)
    expected = results([job(model, packed)])[0]
    path = next(packed.glob("*.packed"))
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    np.testing.assert_array_equal(results([job(model, packed)])[0], expected)
    content[len(content) // 3] ^= 4
    assert path.read_bytes() == content


def test_a_filled_folder_need_not_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an image, or of a volume that is mounted for reading: no lock is taken."""
    ENTRIES["llama3"].make(tmp_path / "model")
    expected = results([job(tmp_path / "model", tmp_path / "packed")])[0]
    monkeypatch.setattr(PackedFolder, "locked", never)
    np.testing.assert_array_equal(results([job(tmp_path / "model", tmp_path / "packed")])[0], expected)


def test_torch_kernels_have_no_packed_weights(tmp_path: Path) -> None:
    ENTRIES["llama3"].make(tmp_path / "model")
    with pytest.raises(ConfigError, match="--packed keeps the weights of native kernels"):
        load(replace(job(tmp_path / "model", tmp_path / "packed"), kernels="aten"))


def mapped() -> set[str]:
    """Returns the lines of packed files that child processes of this one have mapped: process, inode and path."""
    lines = [(pid, line) for pid in child_ids() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {f"{pid} {line.split(maxsplit=4)[4]}" for pid, line in lines if line.endswith(".packed")}


def test_two_engines_map_one_file(tmp_path: Path) -> None:
    """They answer alike, and a third one without a folder does, too."""
    ENTRIES["llama3"].make(tmp_path / "model")
    prompt, params = [TOKENS[:9]], SamplingParams(max_new_tokens=4, temperature=0.0)
    options: dict[str, Any] = {"kv_blocks": 4, "threads": 1}
    with (
        LLM(tmp_path / "model", packed=tmp_path / "packed", **options) as one,
        LLM(tmp_path / "model", packed=tmp_path / "packed", **options) as two,
        LLM(tmp_path / "model", **options) as alone,
    ):
        lines = mapped()
        assert len(lines) == 2
        assert len({line.split(maxsplit=1)[1] for line in lines}) == 1
        texts = [each.generate(prompt, params)[0].choices[0].token_ids for each in (one, two, alone)]
    assert texts[0] == texts[1] == texts[2]
