"""The setting that all sections of bench_serving.py share: the model, the machine's use, and the peers beside tk."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tk.benchmarks.peers.environments import BUILD, python_if_possible
from tk.benchmarks.peers.token_clock import SpeedWorkload
from tk.benchmarks.serving.in_turn import Show
from tk.benchmarks.serving.peer_process import PeerFailed, PeerProcess
from tk.checkpoint import Checkpoint
from tk.core.cpu import Cpu
from tk.core.dtypes import by_code

LLAMACPP: Final = "llama.cpp"
OPENVINO: Final = "OpenVINO"
VLLM: Final = "vLLM"
ENVIRONMENTS: Final = {LLAMACPP: "llamacpp", OPENVINO: "openvino", VLLM: "vllm"}
Q8_0, Q4_0, INT8 = f"{LLAMACPP} Q8_0", f"{LLAMACPP} Q4_0", f"{OPENVINO} int8"
QUANTIZED: Final = {"int8": (Q8_0, INT8), "int4": (Q4_0,)}  # peers by the weight dtype of ours
LONGEST: Final = 4096  # tokens of a sequence


@dataclass(frozen=True)
class Setup:
    """What is measured, and how.

    Attributes:
        model: a Hugging Face folder of a Llama in bf16.
        is_random: whether it is the benchmark's own model.
        threads: the threads of each contestant.
        runs: the runs of each contestant, in turn.
        batches: the batch sizes.
        prompt_tokens, new_tokens: the tokens of each sequence, where a section does not choose them.
        show: prints a line.
        peers: the peers that could be started.
    """

    model: Path
    is_random: bool
    threads: int
    runs: int
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    show: Show
    peers: tuple[PeerProcess, ...] = ()

    def workloads(self, batches: tuple[int, ...] | None = None) -> list[SpeedWorkload]:
        """Returns the workloads of some batch sizes, of all by default."""
        return [SpeedWorkload(batch, self.prompt_tokens, self.new_tokens) for batch in batches or self.batches]


@contextmanager
def running_peers(
    names: Iterable[str], model: Path, threads: int, cpu: Cpu, show: Show
) -> Iterator[tuple[PeerProcess, ...]]:
    """Starts peers, each of which loads the model, for a with block; shows why a peer is left out.

    A name may end with a format to which the peer quantizes weights: of GGUF, as in "llama.cpp Q8_0", or of optimum, as
    in "OpenVINO int8".
    """
    with ExitStack() as stack:
        started = []
        for name in names:
            python = python_if_possible(_environment(name))
            if python is None:
                continue
            command = peer_command(name, python, model, threads, cpu)
            try:
                peer = stack.enter_context(closing(PeerProcess(name, command, BUILD / "peers" / f"{name}.log")))
            except PeerFailed as error:
                show(f"{name} is left out: {error}")
                continue
            show(f"{name} was ready after {peer.ready_seconds:.1f} s")
            started.append(peer)
        yield tuple(started)


def peer_command(name: str, python: Path, model: Path, threads: int, cpu: Cpu) -> list[str]:
    """Returns the command that starts a peer; its products are in bf16 where they are fast on the CPU."""
    module = f"tk.benchmarks.peers.{_environment(name)}_serve"
    precision = "bf16" if {"avx512_bf16", "amx"} & set(cpu.instruction_sets) else "f32"
    dtype = "bfloat16" if "avx512" in cpu.instruction_sets else "float32"
    peer, *quantization = name.split()
    more = {LLAMACPP: quantization, OPENVINO: [precision, *quantization], VLLM: [str(LONGEST), dtype]}[peer]
    return [str(python), "-m", module, str(model.absolute()), str(threads), *more]


def _environment(name: str) -> str:
    return ENVIRONMENTS[name.split()[0]]


def weight_bytes(model: Path) -> tuple[int, int]:
    """Returns the bytes of a model's weights, and those that a new token reads: an embedding gives it one row."""
    checkpoint = Checkpoint.open(model)
    stored = checkpoint.manifest.tensors
    sizes = {name: by_code(it.slots["weight"]).itemsize * math.prod(it.shape) for name, it in stored.items()}
    whole = sum(sizes.values())
    return whole, whole if checkpoint.aliases else whole - sizes["model.embed_tokens.weight"]
