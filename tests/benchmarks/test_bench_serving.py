"""The command that measures serving, on a tiny model."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from tk.benchmarks import bench_serving
from tk.benchmarks.peers.environments import BUILD
from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload
from tk.benchmarks.serving import beside_peers
from tk.benchmarks.serving.in_turn import Promise
from tk.benchmarks.serving.setup import OPENVINO

SMALL = ("--prompt-tokens", "16", "--new-tokens", "24", "--batch", "1", "--batch", "3", "--runs", "1")
SPEED = r"\d+ tokens/s"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A Llama of one small layer, without a tokenizer."""
    shapes = {"model.embed_tokens": (128, 32), "model.norm": (32,), "lm_head": (128, 32)}
    layer = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"), (32, 32))
    layer |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (64, 32)) | {"mlp.down_proj": (32, 64)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= dict.fromkeys(("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"), (32,))
    random = np.random.default_rng(0)
    weights = {f"{name}.weight": random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 256}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    config = {"model_type": "llama", "tie_word_embeddings": False, **sizes, **counts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def run(*arguments: str) -> str:
    """Runs the command; returns what it printed."""
    result = CliRunner().invoke(bench_serving.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.matrix
def test_sections_without_peers_show_figures_and_promises(tiny: Path) -> None:
    output = run("--model", str(tiny), "--peers", "", "--only", "tp,sampling,speculate,start", *SMALL)
    assert re.search(rf"^batch   3 decode   tp=2 {SPEED}   tp=1 \d+ \(x \d", output, re.MULTILINE)
    assert "decode at batch 3 with temperature 1, top_p 0.9 beside greedy with its own logits: " in output
    assert "decode at batch 1 with proposals beside none where text repeats: " in output
    assert "seconds from start to ready: " in output
    [(kept, all_promises)] = re.findall(r"^(\d+) of (\d+) promises are kept", output, re.MULTILINE)
    assert int(all_promises) == 2 * 2 + 2 + 3 + 2  # tp: prefill and decode at 2 batches; sampling; speculate; start
    assert output.count(": kept") == int(kept)
    assert output.count("MISSED") == 2 * (int(all_promises) - int(kept))  # in its section, and at the end


class FixedPeer:
    """A peer with fixed speeds."""

    name = OPENVINO

    def run(self, workload: SpeedWorkload) -> Speeds:
        return {"prefill": 1.0, "decode": 1e9}


def test_peers_are_compared_and_missed_promises_come_again_at_the_end(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def running(names: list[str], *_: Any) -> Iterator[tuple[FixedPeer, ...]]:
        yield (FixedPeer(),) if names else ()

    monkeypatch.setattr(bench_serving, "running_peers", running)
    monkeypatch.setattr(beside_peers, "DECODE_BOUNDS", {(OPENVINO, 3): 1.2})
    output = run("--model", str(tiny), "--only", "prefill,decode", *SMALL)
    assert re.search(rf"^batch   3 decode   tk {SPEED}   OpenVINO 1000000000 \(x 0.00\)$", output, re.MULTILINE)
    assert re.search(
        r"^prefill at batch 1 beside the best peer: \d+.*promised at least 0.95: kept$", output, re.MULTILINE
    )
    missed = "decode at batch 3 beside OpenVINO: 0.00, promised at least 1.2: MISSED by 100%"
    assert output.count(missed) == 2
    assert output.endswith(f"2 of 3 promises are kept, missed:\n{missed}\n")


@pytest.mark.parametrize(
    ("peers", "started"),
    [
        ("llama.cpp,vLLM", ["llama.cpp Q8_0", "llama.cpp Q4_0"]),
        ("OpenVINO", ["OpenVINO int8"]),
        ("vLLM", []),
        ("", []),
    ],
)
def test_quantized_weights_run_beside_quantized_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: str, started: list[str]
) -> None:
    names: list[str] = []

    @contextmanager
    def running(wanted: list[str], *_: Any) -> Iterator[tuple[FixedPeer, ...]]:
        names.extend(wanted)
        yield ()

    monkeypatch.setattr(bench_serving, "running_peers", running)
    monkeypatch.setattr(bench_serving, "SECTIONS", {"weights": lambda _: [Promise("a", 1.0, 1.0)]})
    assert "1 of 1 promises are kept" in run("--model", str(tmp_path), "--only", "weights", "--peers", peers)
    assert names == started


@pytest.mark.parametrize(("option", "known"), [("--only", "prefill, decode"), ("--peers", "llama.cpp, OpenVINO, vLLM")])
def test_unknown_sections_and_peers_are_refused(option: str, known: str) -> None:
    result = CliRunner().invoke(bench_serving.main, [option, "nonsense"])
    assert result.exit_code == 2
    assert "'nonsense' is none of " + known in result.output


def test_the_large_model_is_named_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serving, "large_model", lambda folder: folder / "large")
    output = run("--model", "1b", "--only", "")
    assert f"{BUILD / 'bench' / 'large'}: 2 threads" in output
    assert "0 of 0 promises are kept" in output
