"""The section about quantized weights, on a tiny model beside peers of fixed speeds."""

from pathlib import Path
from typing import Any

import pytest

from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload
from tk.benchmarks.serving.setup import Setup
from tk.benchmarks.serving.weights import weights
from tk.tests.infer.serve.tiny_model import write_tiny_model

OPENVINO = "int8 weights beside OpenVINO int8"
KINDS = {"decode": 1.1, "prefill": 0.85}
BESIDE_PEERS = ("int8 weights beside llama.cpp Q8_0", "int4 weights beside llama.cpp Q4_0")


class FixedPeer:
    """A peer with a fixed speed of decoding; llama.cpp's runs at batch 1 alone."""

    def __init__(self, name: str, speed: float) -> None:
        self.name, self._speed = name, speed

    def run(self, workload: SpeedWorkload) -> Speeds:
        assert workload.batch == 1 or self.name == "OpenVINO int8"
        return {"prefill": 1.0, "decode": self._speed}


@pytest.mark.matrix
def test_each_dtype_is_compared_with_the_format_of_as_many_bits(tmp_path: Path) -> None:
    shown: list[str] = []
    peers: Any = (FixedPeer("llama.cpp Q8_0", 1e9), FixedPeer("llama.cpp Q4_0", 1e-3), FixedPeer("OpenVINO int8", 1e9))
    setup = Setup(write_tiny_model(tmp_path / "model"), False, 1, 1, (1, 8), 8, 16, shown.append, peers)
    promises = {each.text: each for each in weights(setup)}
    int8, int4 = (promises.pop(f"decode at batch 1 with {name}") for name in BESIDE_PEERS)
    assert (int8.bound, int4.bound) == (1.5, 1.2)
    assert int8.found < 1.5 < int4.found
    for batch in (1, 8):
        ratios = {
            kind: promises.pop(f"{kind} at batch {batch} with int8 weights beside OpenVINO int8") for kind in KINDS
        }
        assert {kind: each.bound for kind, each in ratios.items()} == KINDS
        assert ratios["decode"].found < 1 < ratios["prefill"].found
    assert {text.removesuffix(" weights beside bf16"): each.bound for text, each in promises.items()} == {
        "prefill at batch 1 with int8": 0.8,
        "decode at batch 1 with int8": 2.0,
        "prefill at batch 1 with int4": 0.62,
        "decode at batch 1 with int4": 2.6,
        "prefill at batch 8 with int8": 0.8,
        "decode at batch 8 with int8": 1.15,
        "prefill at batch 8 with int4": 0.62,
        "decode at batch 8 with int4": 1.45,
    }
    assert [line[:17] for line in shown] == [
        f"batch {n} {kind}" for n in ("  1", "  8") for kind in ("prefill", "decode ")
    ]
    assert "tk int8 weights" in shown[1]
    assert "llama.cpp Q8_0 1000000000 (x 0.00)" in shown[1]
    assert "llama.cpp" not in shown[3]
