"""The facts about a checkpoint before a worker loads it: dtypes, tokenizer, end tokens, memory."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tk.core.console_log import show_log
from tk.core.errors import CheckpointError, ConfigError, StorageError
from tk.core.layout import Layout
from tk.infer import LLM
from tk.infer.engine.job import Job
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.planning.model_source import ModelSource
from tk.scripts.broken_checkpoints import is_found_by_verify
from tk.tests.checkpoint.saving import LLAMA, LLAMA_CONFIG, MIXED, save_step


def test_the_model_is_described_as_it_will_be_served(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("grouped")
    source = ModelSource.open(
        EngineOptions(folder, kv_blocks=8, block_size=16, max_running=3, kv_dtype="int8", kernels="aten")
    )
    info = source.info
    assert (info.name, info.architecture, info.vocab_size, info.eos_token_ids) == (folder.name, "llama", 264, (263,))
    assert (info.dtype, info.weight_dtype, info.kv_dtype) == ("fp32", "fp32", "int8"), "as stored, and as given"
    assert (info.num_blocks, info.block_size, info.max_model_len, info.max_running) == (8, 16, 128, 3)
    assert info.kv_bytes_per_token == 2 * 2 * 4 * (8 + 4)
    assert source.tokenizer is not None
    assert source.tokenizer.decode(source.tokenizer.encode("abc")) == "abc"


def test_a_worker_gets_the_decisions(model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    options = EngineOptions(
        model_folder("grouped"), kv_blocks=8, dtype="bf16", max_batched_tokens=96, kernels="aten", batch_invariant=True
    )
    source = ModelSource.open(options)
    assert source.job() == Job(
        checkpoint=str(options.checkpoint),
        kernels="aten",
        dtype="bf16",
        kv_dtype="bf16",
        num_blocks=8,
        kv_bytes=source.memory.kv_bytes,
        block_size=32,
        max_batched_tokens=96,
        tp=1,
        threads=3,
        fingerprint=source.checkpoint.folder.fingerprint,
        weight_dtype="bf16",
        max_model_len=source.info.max_model_len,
        batch_invariant=True,
    )


def test_workers_show_their_log_as_the_engine_does(model_folder: Callable[[str], Path]) -> None:
    source = ModelSource.open(EngineOptions(model_folder("grouped"), kv_blocks=8))
    show_log("json")
    assert source.job().log == "json"
    show_log()
    assert source.job().log == "text"
    show_log("quiet text")
    assert source.job().log == "quiet text"


def test_quantized_weights_are_described_and_planned(model_folder: Callable[[str], Path]) -> None:
    options = EngineOptions(model_folder("tied"), kv_blocks=8, weight_dtype="int8")
    source, plain = ModelSource.open(options), ModelSource.open(replace(options, weight_dtype="auto"))
    assert (source.info.dtype, source.info.weight_dtype, source.job().weight_dtype) == ("fp32", "int8", "int8")
    assert source.memory.weight_bytes < 0.35 * plain.memory.weight_bytes
    assert source.memory.table().splitlines()[0].startswith("weights   int8")


def test_without_a_tokenizer_the_end_tokens_are_those_of_the_config(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(model_folder("grouped"), folder, ignore=shutil.ignore_patterns("tokenizer*"))
    source = ModelSource.open(EngineOptions(folder, kv_blocks=8))
    assert source.tokenizer is None
    assert source.info.eos_token_ids == (263,)


def test_weights_of_a_dtype_that_is_not_served_need_one(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    shutil.copytree(model_folder("grouped"), folder)
    weights = {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"stores its weights as F64.*use --dtype fp32 or bf16 or fp16"):
        ModelSource.open(EngineOptions(folder, kv_blocks=8))
    assert ModelSource.open(EngineOptions(folder, kv_blocks=8, dtype="fp32")).info.dtype == "fp32"


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("damaged", "served_as", "refused"),
    [
        ("model-*.safetensors", "bf16", True),
        ("optim-master-*.safetensors", "fp32", True),  # the masters are cast
        ("optim-master-*.safetensors", "bf16", False),
        ("optim-exp_avg-*.safetensors", "bf16", False),
        ("config.json", "bf16", True),
        ("tokenizer_config.json", "bf16", True),
    ],
)
def test_the_served_weights_are_checked_and_the_rest_is_not_read(
    tmp_path: Path, damaged: str, served_as: str, refused: bool
) -> None:
    config = {**LLAMA_CONFIG, "max_position_embeddings": 64}
    side_files = {"config.json": json.dumps(config).encode(), "tokenizer_config.json": b"{}"}
    step = save_step(tmp_path / "run", LLAMA, Layout(tp=2, dp=2, zero=1), MIXED, side_files=side_files)
    path = max(step.glob(damaged), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)

    if refused:
        with pytest.raises(CheckpointError, match=path.name):
            LLM(step, dtype=served_as, kv_blocks=4)
    else:
        with LLM(step, dtype=served_as, kv_blocks=4) as llm:
            assert llm.model_info().step == 1
    assert is_found_by_verify(step), "`tk verify` finds it"


def test_a_model_has_the_names_that_it_is_given_and_the_time_of_its_commit(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder("grouped")
    names = ("first", "second")
    info = ModelSource.open(EngineOptions(folder, kv_blocks=8, served_model_names=names)).info
    assert (info.name, info.aliases, info.names) == ("first", ("second",), names)
    [weights] = folder.glob("*.safetensors")
    assert info.created == int(weights.stat().st_mtime)
    side_files = {"config.json": json.dumps({**LLAMA_CONFIG, "max_position_embeddings": 64}).encode()}
    step = save_step(tmp_path / "run", LLAMA, Layout(), MIXED, side_files=side_files)
    os.utime(step / "manifest.json", (1_700_000_000.75, 1_700_000_000.75))
    infos = [ModelSource.open(EngineOptions(path, kv_blocks=16)).info for path in (step, tmp_path / "run")]
    assert [(info.name, info.aliases, info.created) for info in infos] == [("run", (), 1_700_000_000)] * 2


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000])
def test_a_path_that_no_system_takes_is_an_error_of_ours(name: str) -> None:
    """The system's own error ended `Admin.Reload` as a defect."""
    with pytest.raises(StorageError, match=r"(?i)name too long"):
        ModelSource.open(EngineOptions(Path(name)))
