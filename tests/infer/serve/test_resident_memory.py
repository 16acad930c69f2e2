"""The resident memory of a server's processes: after its start, under full load, and as the cache fills."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tk.infer import LLM, SamplingParams
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.step.channel import Frame, receive, send
from tk.infer.engine.worker.processes import WorkerProcesses
from tk.tests.infer.serve.serving import Serving

MIB = 1 << 20
LENGTH = 4096
pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 13.6 M random parameters in fp32, more than half of them in the embeddings."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def resident(process: int) -> int:
    """Returns the bytes of a process that are in memory, shared libraries included."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def weight_bytes(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_after_the_start_little_more_than_the_weights_is_resident(model: Path, tp: int) -> None:
    """Counted as often as processes have it: the sum of RSS is more than that of PSS, which divides shared pages."""
    serving = Serving(str(model), "--kv-memory", "512MiB", "--tp", str(tp)).wait_ready()
    try:
        workers = serving.worker_ids()
        assert len(workers) == tp
        extra = 150 * MIB + (tp - 1) * 64 * MIB  # another process and its libraries
        assert resident(serving.process.pid) + sum(map(resident, workers)) < weight_bytes(model) + extra
        maps = [Path(f"/proc/{process}/maps").read_text() for process in (serving.process.pid, *workers)]
        assert not any("libtorch" in text for text in maps)
    finally:
        serving.close()


@contextmanager
def idle_worker(threads: int) -> Iterator[int]:
    """Yields the process id of a worker that has imported its modules and has refused its job."""
    with closing(WorkerProcesses(1, threads)) as processes:
        [connection] = processes.connections()
        send(connection, Frame("start", {"tp": 1}))
        answer = receive(connection)
        assert answer is not None
        assert answer.op == "error"
        yield processes.process_ids[0]


@pytest.mark.parametrize("weight_dtype", ["auto", pytest.param("int4", marks=pytest.mark.matrix)])
def test_a_step_of_full_load_stays_within_the_plan(model: Path, weight_dtype: str) -> None:
    params = SamplingParams(max_new_tokens=32, prompt_logprobs=20, logprobs=20, ignore_eos=True)
    tokens = 2048
    with idle_worker(2) as idle:
        process = resident(idle)
    options: dict[str, Any] = {"kernels": "native", "threads": 2, "kv_blocks": 65, "weight_dtype": weight_dtype}
    with LLM(model, max_batched_tokens=tokens, **options) as llm:
        [worker] = llm.engine.worker_process_ids
        [completion] = llm.generate([[7] * tokens], params)
        assert len(completion.prompt_logprobs) == tokens
        used, plan = resident(worker) - process, llm.engine.source.memory
    assert plan.buffer_bytes > 50 * MIB
    assert 0.8 * plan.total_bytes < used < plan.total_bytes + 16 * MIB, "kernels, and the requests themselves"


def cache_resident(process: int) -> int:
    """Returns the bytes of a worker's cache that are in memory: of its anonymous mappings of 200 MiB and more."""
    found, size, anonymous = 0, 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        key, value, *rest = line.split()
        if "-" in key:
            anonymous = len(rest) == 3
        elif key == "Size:":
            size = int(value) << 10
        elif key == "Rss:" and anonymous and size >= 200 * MIB:
            found += int(value) << 10
    return found


@pytest.mark.parametrize("kernels", ["native", pytest.param("aten", marks=pytest.mark.matrix)])
def test_pages_of_the_cache_are_committed_as_they_are_used(model: Path, kernels: str) -> None:
    one = SamplingParams(max_new_tokens=1)
    with LLM(model, kernels=kernels, kv_memory=1 << 30) as llm:
        [worker] = llm.engine.worker_process_ids
        plan = llm.engine.source.memory
        assert plan.kv_bytes > 900 * MIB
        assert resident(worker) < plan.weight_bytes + (100 if kernels == "native" else 500) * MIB
        llm.generate([[7] * 512], one)  # touches buffers, and the blocks of 512 tokens
        whole, cache = resident(worker), cache_resident(worker)
        llm.generate([[7] * 512], one)
        assert resident(worker) < whole + 8 * MIB
        llm.generate([[7] * (LENGTH - 1)], one)
        longest = plan.kv_bytes_per_token * (LENGTH - 1 - 512)
        assert 0.8 * longest < cache_resident(worker) - cache < longest + 8 * MIB, "buffers may share a mapping"
