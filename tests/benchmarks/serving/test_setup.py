"""The peers' commands, the bytes of a model, and peers that cannot be had."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tk.benchmarks.serving import setup
from tk.benchmarks.serving.setup import (
    ENVIRONMENTS,
    INT8,
    LLAMACPP,
    OPENVINO,
    Q4_0,
    Q8_0,
    VLLM,
    peer_command,
    running_peers,
    weight_bytes,
)
from tk.core.cpu import INSTRUCTION_SETS, Cpu

PLAIN = Cpu("plain", INSTRUCTION_SETS["avx2"])


@pytest.mark.parametrize(
    ("name", "precision"), [("avx2", "f32"), ("avx512", "f32"), ("avx512_bf16", "bf16"), ("amx", "bf16")]
)
def test_openvino_multiplies_in_bf16_where_the_cpu_does(name: str, precision: str) -> None:
    command = peer_command(OPENVINO, Path("python"), Path("/model"), 2, Cpu("a", INSTRUCTION_SETS[name]))
    assert command == ["python", "-m", "tk.benchmarks.peers.openvino_serve", "/model", "2", precision]
    quantized = peer_command(INT8, Path("python"), Path("/model"), 2, Cpu("a", INSTRUCTION_SETS[name]))
    assert quantized == [*command, "int8"]


@pytest.mark.parametrize(("name", "dtype"), [("avx2", "float32"), ("avx512", "bfloat16"), ("amx", "bfloat16")])
def test_vllm_computes_in_bf16_where_torch_does(name: str, dtype: str) -> None:
    command = peer_command(VLLM, Path("python"), Path("/model"), 2, Cpu("a", INSTRUCTION_SETS[name]))
    assert command == ["python", "-m", "tk.benchmarks.peers.vllm_serve", "/model", "2", "4096", dtype]


def test_llamacpp_gets_the_format_of_quantized_weights() -> None:
    commands = [peer_command(name, Path("python"), Path("/model"), 2, PLAIN) for name in (LLAMACPP, Q4_0)]
    plain = ["python", "-m", "tk.benchmarks.peers.llamacpp_serve", "/model", "2"]
    assert commands == [plain, [*plain, "Q4_0"]]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_peer_has_a_module_and_requirements(name: str, root_of_peers: Path) -> None:
    module = peer_command(name, Path("python"), Path("model"), 2, PLAIN)[2]
    assert (root_of_peers / f"{module.rpartition('.')[2]}.py").exists()
    assert (root_of_peers / f"{ENVIRONMENTS[name]}.txt").exists()


@pytest.fixture
def root_of_peers() -> Path:
    return Path(__file__).resolve().parents[3] / "benchmarks" / "peers"


def test_peers_that_cannot_be_had_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(setup, "BUILD", tmp_path)
    monkeypatch.setattr(setup, "python_if_possible", lambda name: None if name == "vllm" else Path(sys.executable))
    monkeypatch.setattr(setup, "peer_command", lambda *_: [sys.executable, "-c", "raise SystemExit('no model')"])
    with running_peers([*ENVIRONMENTS, Q8_0], tmp_path, 2, PLAIN, shown.append) as peers:
        assert peers == ()
    assert [line.split(" (see")[0] for line in shown] == [
        "llama.cpp is left out: llama.cpp failed: no model",
        "OpenVINO is left out: OpenVINO failed: no model",
        "llama.cpp Q8_0 is left out: llama.cpp Q8_0 failed: no model",
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_reads_the_weights_but_the_embedding(tmp_path: Path, tied: bool) -> None:
    shapes = {"model.embed_tokens.weight": (10, 4), "model.norm.weight": (4,)} | (
        {} if tied else {"lm_head.weight": (10, 4)}
    )
    save_file({name: np.zeros(shape, np.float16) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weight_bytes(tmp_path) == ((88, 88) if tied else (168, 88))
