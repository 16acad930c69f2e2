"""Signals to a server whose next engine or chat template hangs: it ends in its time all the same."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path

import grpc
import pytest

from tk.core.errors import TkError
from tk.infer.client.client import Client
from tk.infer.engine.request.prompts import Conversation
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub
from tk.tests.child_processes import command_of
from tk.tests.infer.serve.forced_steps import save_forced_step
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

SLACK = 20.0  # seconds beside a promised time, for a machine that does other work; WAIT_SECONDS is a server that hangs
DRAIN_SECONDS = 1.0
QUICK, SLOW = (Conversation([{"role": "user", "content": text}]) for text in ("hi", "slow"))
TEMPLATE = """{{ messages[0].content }}
{%- if messages[0].content == "slow" %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}
{%- endif %}"""


class Hanging:
    """A server and a call that never ends by itself."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving.wait_ready()
        self._workers = set(serving.worker_ids())
        self.stopped = set[int]()

    def stop_new_children(self, cpu_seconds: float = 0.0) -> None:
        """Stops the processes that the server has started since it was ready, once one used that much more CPU time."""
        deadline, before = time.monotonic() + WAIT_SECONDS, self._cpu_time()
        while not self._new_children() or self._cpu_time() < before + cpu_seconds:
            assert time.monotonic() < deadline, "the server starts no process, or it computes nothing"
        self.stopped = self._new_children()
        for process in self.stopped:
            os.kill(process, signal.SIGSTOP)

    def _new_children(self) -> set[int]:
        """Returns the new children that run a program of their own: one before that would also stop its server."""
        others = (b"", command_of(self.serving.process.pid))
        return {child for child in set(self.serving.worker_ids()) - self._workers if command_of(child) not in others}

    def _cpu_time(self) -> float:
        """Returns the seconds of CPU time that the new children have used."""
        fields = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in self._new_children()]
        return sum(int(stat[11]) + int(stat[12]) for stat in fields) / os.sysconf("SC_CLK_TCK")


@contextmanager
def reloading(folder: Path, *options: str) -> Iterator[tuple[Hanging, Callable[[], object]]]:
    """A server whose next engine's worker is stopped while it loads."""
    model, run = write_tiny_model(folder / "model"), folder / "run"
    save_forced_step(run, model, 1)
    with closing(Serving(str(run), *options)) as serving:
        hanging = Hanging(serving)
        request = pb.ReloadRequest(checkpoint=str(save_forced_step(run, model, 2)))
        with grpc.insecure_channel(serving.target) as channel, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(AdminStub(channel).Reload, request, timeout=WAIT_SECONDS)
            hanging.stop_new_children()
            yield hanging, asked.result


@contextmanager
def rendering(folder: Path, *options: str) -> Iterator[tuple[Hanging, Callable[[], object]]]:
    """A server whose process of the chat template is stopped while it renders."""
    model = write_tiny_model(folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with closing(Serving(str(model), *options)) as serving:
        hanging = Hanging(serving)
        with Client(serving.target, max_attempts=1) as client, ThreadPoolExecutor(1) as pool:
            client.generate([QUICK], SamplingParams(max_new_tokens=1))
            asked = pool.submit(client.generate, [SLOW], SamplingParams(max_new_tokens=1))
            hanging.stop_new_children(cpu_seconds=0.1)
            yield hanging, asked.result


@pytest.mark.parametrize(
    ("hangs", "num_signals"),
    [
        (reloading, 1),
        (rendering, 2),
        pytest.param(reloading, 2, marks=pytest.mark.matrix),
        pytest.param(rendering, 1, marks=pytest.mark.matrix),
    ],
)
def test_signals_end_a_server_in_its_time(
    tmp_path: Path,
    hangs: Callable[..., AbstractContextManager[tuple[Hanging, Callable[[], object]]]],
    num_signals: int,
) -> None:
    drain_seconds = DRAIN_SECONDS if num_signals == 1 else WAIT_SECONDS
    options = ("--kv-blocks", "64", "--threads", "1", "--drain-timeout", str(drain_seconds))
    with hangs(tmp_path, *options) as (hanging, result):
        process = hanging.serving.process
        process.send_signal(signal.SIGTERM)
        codes = {0 if num_signals == 1 else 130}
        if num_signals == 2:
            # A reload does not hold up a drain, which may be over when the second signal comes: an ordinary end.
            codes |= {0} if hangs is reloading else set()
            with suppress(grpc.RpcError) if hangs is reloading else nullcontext():
                hanging.serving.wait_draining()
            process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        code, _, log = hanging.serving.wait()
        seconds = time.monotonic() - begun
        with pytest.raises((TkError, grpc.RpcError)):
            result()
        left = [process for process in hanging.stopped if Path(f"/proc/{process}").exists()]
        assert code in codes, log
        assert left == [], log
        assert seconds < (DRAIN_SECONDS + 2 if num_signals == 1 else 1) + SLACK
