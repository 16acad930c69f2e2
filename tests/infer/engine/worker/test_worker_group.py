"""Worker processes: their death is noticed, their errors keep their class, nothing outlives the engine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tk
from tk.checkpoint import Checkpoint, reshard
from tk.core.errors import Cancelled, ShapeMismatch, ShardCorrupt, TkError, WorkerDied
from tk.core.layout import Layout
from tk.core.process import PARENT_VARIABLE
from tk.infer import LLM, SamplingParams
from tk.infer.engine.engine import Engine
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.request.events import Failed
from tk.infer.engine.request.request import Request
from tk.infer.engine.worker.adapter_loaders import AdapterLoaders, PackedOrder
from tk.infer.engine.worker.processes import WorkerProcesses
from tk.infer.engine.worker.step_watch import StepWatch
from tk.infer.engine.worker.worker_group import WorkerGroup
from tk.model.config import ModelConfig
from tk.model.registry import tensor_table
from tk.tests.child_processes import has_ended
from tk.tests.infer.engine.free_blocks import num_free_blocks

ECHO = "tk.tests.infer.engine.worker.echo_worker"
LONG = SamplingParams(max_new_tokens=600, ignore_eos=True)


def await_gone(process_ids: tuple[int, ...]) -> None:
    deadline = time.monotonic() + 60
    while not all(map(has_ended, process_ids)):
        assert time.monotonic() < deadline, f"still there: {process_ids}"
        time.sleep(0.02)


@pytest.mark.parametrize(("tp", "victim", "busy"), [(2, 1, True), (1, 0, False)])
def test_a_killed_worker_fails_live_requests(
    model_folder: Callable[[str], Path], tp: int, victim: int, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exit_code = WorkerProcesses.exit_code

    def on_a_busy_machine(processes: WorkerProcesses, rank: int, timeout: float) -> int | None:
        return None if 0 < timeout < 1 else exit_code(processes, rank, timeout)

    monkeypatch.setattr(WorkerProcesses, "exit_code", on_a_busy_machine)
    engine = Engine.start(EngineOptions(model_folder("grouped"), tp=tp, kv_blocks=20))
    try:
        died, submitted, failures = threading.Event(), threading.Event(), []
        engine.watch(lambda error: died.set())
        workers = engine.worker_process_ids
        assert len(workers) == tp

        def sink(event: object) -> None:
            """Kills at the first event, on the engine's thread, so that no request ends before."""
            if isinstance(event, Failed):
                failures.append(event.error)
            elif submitted.wait(60):
                os.kill(workers[victim], signal.SIGKILL)

        if busy:
            engine.submit(Request((1, 2), LONG, "a"), sink)
            engine.submit(Request((1, 2), LONG, "b"), sink)
            submitted.set()
        else:
            os.kill(workers[victim], signal.SIGKILL)
        assert died.wait(60), "a step may take five minutes: a death is noticed without its answer"
        assert [type(error) for error in failures] == [WorkerDied] * (2 if busy else 0)
        assert all(f"rank {victim}" in str(error) and "signal 9" in str(error) for error in failures)
        with pytest.raises(WorkerDied):
            engine.submit(Request((1,), LONG, "c"), sink)
        assert engine.num_live == 0
        again = threading.Event()
        engine.watch(lambda error: again.set())
        assert again.is_set()
        await_gone(workers)
    finally:
        engine.close()


def test_requests_fail_before_the_dead_are_reaped(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed_at_close: list[int] = []
    failures: list[TkError] = []
    close = WorkerGroup.close

    def observed(group: WorkerGroup, kill: bool = False) -> None:
        failed_at_close.append(len(failures))
        close(group, kill)

    def sink(event: object) -> None:
        if isinstance(event, Failed):
            failures.append(event.error)
        else:
            engine.kill()  # on the engine's thread, so that the request does not end before

    monkeypatch.setattr(WorkerGroup, "close", observed)
    engine = Engine.start(EngineOptions(model_folder("grouped"), kv_blocks=20))
    died = threading.Event()
    engine.watch(lambda error: died.set())
    try:
        engine.submit(Request((1, 2), LONG, "a"), sink)
        assert died.wait(20)
    finally:
        engine.close()
    assert failed_at_close == [1]
    assert [type(error) for error in failures] == [WorkerDied]


def test_killed_workers_start_again_and_give_the_same_tokens(llm: LLM, model_folder: Callable[[str], Path]) -> None:
    params = SamplingParams(seed=3, max_new_tokens=12, ignore_eos=True)
    prompt = [1, 2, 3] * 12
    expected = llm.generate(prompt, params)[0].token_ids
    with LLM(model_folder("grouped"), tp=2, kv_blocks=20, max_restarts=1) as restarting:
        engine = restarting.engine
        assert [restarting.generate(prompt, params)[0].usage.cached_tokens for _ in range(2)] == [0, 32]
        failures: list[TkError] = []
        before, back, gone_for_good = engine.worker_process_ids, threading.Event(), threading.Event()
        states: list[WorkerDied | None] = []

        def watcher(error: WorkerDied | None) -> None:
            states.append(error)
            if error is None:
                back.set()
            elif error.retry_after is None:
                gone_for_good.set()
            else:  # on the engine's thread, before the workers start again
                assert len(failures) == 1
                with pytest.raises(WorkerDied) as refused:
                    engine.submit(Request((1,), LONG, "b"), lambda event: None)
                assert refused.value.retry_after == error.retry_after

        def sink(event: object) -> None:
            if isinstance(event, Failed):
                failures.append(event.error)
            else:
                os.kill(before[1], signal.SIGKILL)

        engine.watch(watcher)
        engine.submit(Request((1, 2), LONG, "a"), sink)
        assert back.wait(60)
        assert [type(error) for error in failures] == [WorkerDied]
        assert isinstance(failures[0], WorkerDied)
        assert failures[0].retry_after is not None
        assert failures[0].retry_after >= 1
        await_gone(before)
        after = engine.worker_process_ids
        assert not set(after) & set(before)
        (again,) = restarting.generate(prompt, params)
        assert again.token_ids == expected
        assert again.usage.cached_tokens == 0, "the new workers' cache is empty"
        assert engine.statistics.check_cache().problems == ()
        assert num_free_blocks(engine) == 20
        os.kill(after[0], signal.SIGKILL)
        assert gone_for_good.wait(60)
        assert [error and error.retry_after is None for error in states] == [False, None, True]
        with pytest.raises(WorkerDied, match="signal 9"):
            restarting.generate([1, 2, 3], params)


def test_an_engine_that_is_killed_starts_nothing_again(model_folder: Callable[[str], Path]) -> None:
    engine = Engine.start(EngineOptions(model_folder("grouped"), kv_blocks=20, max_restarts=5))
    over = threading.Event()
    engine.watch(lambda error: over.set() if error is not None and error.retry_after is None else None)
    engine.kill()
    assert over.wait(20)
    engine.close()


def test_a_close_does_not_wait_for_workers_that_start_again(model_folder: Callable[[str], Path]) -> None:
    engine = Engine.start(EngineOptions(model_folder("grouped"), kv_blocks=20, max_restarts=5))
    refusing = threading.Event()
    engine.watch(lambda error: refusing.set())
    os.kill(engine.worker_process_ids[0], signal.SIGKILL)
    assert refusing.wait(20)
    engine.close()
    await_gone(engine.worker_process_ids)


@pytest.mark.every(2)
@pytest.mark.skipif(not instruction_sets(), reason="no compiler")
@pytest.mark.parametrize(
    ("kernels", "tp"),
    [("native", 2), ("aten", 1), *(pytest.param("native", tp, marks=pytest.mark.matrix) for tp in (1, 4))],
)
def test_native_workers_load_no_torch(model_folder: Callable[[str], Path], kernels: str, tp: int) -> None:
    with LLM(model_folder("grouped"), kernels=kernels, tp=tp, kv_blocks=20) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_new_tokens=2))
        maps = [Path(f"/proc/{worker}/maps").read_text() for worker in llm.engine.worker_process_ids]
    assert len(maps) == tp
    assert all("kernels" in each for each in maps) == (kernels == "native")
    assert all(("libtorch" in each) == (kernels == "aten") for each in maps)


def test_close_ends_the_workers_and_live_requests(model_folder: Callable[[str], Path]) -> None:
    engine = Engine.start(EngineOptions(model_folder("grouped"), kv_blocks=20))
    workers, failures = engine.worker_process_ids, []
    long = replace(LONG, n=16)  # so that it does not end before the close
    engine.submit(Request((1,), long, "a"), lambda event: failures.append(event) if isinstance(event, Failed) else None)
    engine.close()
    engine.close()
    assert [type(event.error).__name__ for event in failures] == ["Cancelled"]
    await_gone(workers)


def test_a_worker_error_keeps_its_class(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("grouped"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] = np.zeros((64, 95), np.float32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ShapeMismatch, match=r"layers\.1\.mlp\.down_proj") as error:
        Engine.start(EngineOptions(folder, kv_blocks=4))
    assert error.value.exit_code == 3


def test_a_sharded_checkpoint_is_served_and_a_flipped_bit_refused(
    llm: LLM, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source, run = model_folder("grouped"), tmp_path / "run"
    reshard(source, run / "step-00000000", layout=Layout(tp=4), table=tensor_table(ModelConfig.from_folder(source)))
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    with LLM(run, tp=2, kv_blocks=8) as sharded:
        assert sharded.generate([1, 2, 3], params)[0].token_ids == llm.generate([1, 2, 3], params)[0].token_ids
        assert (sharded.model_info().name, sharded.model_info().dtype) == ("run", "fp32")
        assert sharded.model_info().manifest_sha256 == Checkpoint.open(run).manifest_sha256
    shard = max(run.glob("*/*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ShardCorrupt, match=shard.name) as error:
        Engine.start(EngineOptions(run, kv_blocks=8))
    assert error.value.exit_code == 3


def test_logits_that_are_not_finite_fail_their_request_alone(
    llm: LLM, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("grouped"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][200] = np.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    params = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True, logit_bias={200: -1e9})
    expected = [completion.token_ids for completion in llm.generate([[1, 2], [3] * 40], params)]
    with LLM(folder, kv_blocks=4) as broken:
        for _ in range(3):  # blocks of the failed request are used again
            with pytest.raises(TkError, match="not finite") as error:
                broken.generate([[5] * 50 + [200, 7]], params)
            assert type(error.value) is TkError
            assert [completion.token_ids for completion in broken.generate([[1, 2], [3] * 40], params)] == expected
        assert broken.engine.statistics.check_cache().problems == ()


SCRIPT = """
import json, sys
from tk.infer import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_blocks=8)
assert "torch" not in sys.modules, "the parent imported torch"
(found,) = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True))
print(json.dumps({"tokens": found.token_ids, "workers": llm.engine.worker_process_ids}), flush=True)
"""


def script(ending: str, folder: Path, cwd: Path) -> "subprocess.Popen[str]":
    paths = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert process.stdin is not None
    process.stdin.write(SCRIPT + ending)
    process.stdin.close()
    return process


@pytest.mark.parametrize("ending", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"])
def test_a_script_on_stdin_and_its_workers_end_together(
    llm: LLM, model_folder: Callable[[str], Path], tmp_path: Path, ending: str
) -> None:
    process = script(ending, model_folder("grouped"), tmp_path)
    assert process.stdout is not None
    with process, process.stdout:
        answer = json.loads(process.stdout.readline())
        assert process.wait(60) == (-signal.SIGKILL if ending else 0)
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    assert answer["tokens"] == list(llm.generate([1, 2, 3], params)[0].token_ids)
    await_gone(tuple(answer["workers"]))


def test_a_worker_whose_engine_is_gone_ends_before_it_loads_anything() -> None:
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    somebody_else = str(os.getppid())
    worker = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tk.infer.engine.worker.worker_entry", "0"],
        env=os.environ | {"PYTHONPATH": paths, PARENT_VARIABLE: somebody_else},
        stderr=subprocess.PIPE,
        text=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in worker.stderr.splitlines()}
    assert worker.returncode == 1
    assert "tk.core.process" in imported
    assert not imported & {"torch", "numpy", "tk.infer.engine.worker.worker"}


def test_nothing_on_this_side_imports_torch() -> None:
    imports = "import sys, tk.infer.engine.llm, tk.infer.engine.engine; from tk.infer import LLM, Client"
    code = f"{imports}; assert 'torch' not in sys.modules"
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": paths})
    assert tk.infer.SamplingParams is SamplingParams


def test_workers_that_a_signal_closed_before_their_start_are_no_defect() -> None:
    """The main thread closes the processes while the engine's thread is about to give them their jobs."""
    processes = WorkerProcesses(1, 1)
    connections = processes.connections()
    processes.close()
    for connection in connections:
        connection.close()
    job = Job("model", "aten", "fp32", "fp32", num_blocks=3, kv_bytes=0, block_size=16, max_batched_tokens=16)
    group = WorkerGroup(processes, StepWatch(None, lambda error: None))
    with pytest.raises(Cancelled, match="closed while they were starting"):
        group.start(job, 60.0)
    group.close(kill=True)


def test_an_adapter_that_other_workers_have_packed_is_not_put_into_its_slot() -> None:
    """They have died between the two."""
    group = WorkerGroup(WorkerProcesses(1, 1, ECHO), StepWatch(None, lambda error: None))
    with closing(group), pytest.raises(WorkerDied, match="ended before the adapter was loaded"):
        group.put_adapter(PackedOrder(1, AdapterLoaders(())))
