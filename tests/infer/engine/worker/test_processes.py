"""The processes of workers: their sockets, their end, and their environment. Here they run a module without torch."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tk.infer.engine.worker import processes
from tk.infer.engine.worker.processes import WorkerProcesses, worker_environment

ECHO = "tk.tests.infer.engine.worker.echo_worker"


@pytest.fixture
def two() -> Iterator[WorkerProcesses]:
    with closing(WorkerProcesses(2, 3, ECHO)) as found:
        yield found


def test_every_rank_has_a_process_at_the_other_end_of_its_socket(two: WorkerProcesses) -> None:
    answers = []
    for connection in two.connections():
        connection.settimeout(60)
        connection.sendall(b"x")
        answers.append(connection.recv(64).decode().split())
    assert [int(process_id) for process_id, _ in answers] == list(two.process_ids)
    assert [threads for _, threads in answers] == ["3", "3"]


def test_a_worker_ends_with_its_socket_or_is_killed(two: WorkerProcesses) -> None:
    first, second = two.connections()
    assert two.exit_code(0, 0.0) is None
    first.close()
    assert two.exit_code(0, 60) == 7
    two.kill()
    assert two.exit_code(1, 60) == -signal.SIGKILL
    assert second.recv(1) == b""


def test_a_close_reaps_all_and_may_be_repeated(two: WorkerProcesses) -> None:
    two.connections()
    ids = two.process_ids
    two.close()
    two.close()
    for process_id in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_a_close_lets_workers_end_by_themselves(two: WorkerProcesses) -> None:
    for connection in two.connections():
        connection.settimeout(60)
        connection.sendall(b"x")
        connection.recv(64)  # they handle their sockets' end from here on
    two.close(kill=False)
    assert [two.exit_code(rank, 0) for rank in range(2)] == [7, 7]


def test_a_close_stops_the_start() -> None:
    """As of a model whose heads do not fit so many ranks, which is known when a few processes have started."""
    made = WorkerProcesses(10**6, 1)
    while not made.process_ids:
        time.sleep(0.01)
    made.close()
    assert 1 <= len(made.process_ids) < 1000
    assert all(made.exit_code(rank, 0.0) is not None for rank in range(len(made.process_ids)))


def test_workers_that_do_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "EXIT_TIMEOUT", 0.0)
    begun = time.monotonic()
    stuck = WorkerProcesses(1, 1, "tk.tests.infer.engine.worker.stuck_worker")
    stuck.connections()
    stuck.close(kill=False)
    assert stuck.exit_code(0, 0) == -signal.SIGKILL
    assert time.monotonic() - begun < 60


def test_others_of_the_same_kind_start_again(two: WorkerProcesses) -> None:
    two.connections()
    with closing(two.again()) as others:
        assert len(others.connections()) == 2
        assert not set(others.process_ids) & set(two.process_ids)


def test_processes_that_cannot_start_are_an_error_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(processes, "start_module", refuse)
    with closing(WorkerProcesses(2, 1, ECHO)) as failed:
        for _ in range(2):
            with pytest.raises(OSError, match="temporarily unavailable"):
                failed.connections()


def test_the_users_environment_stays_but_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert worker_environment(2) == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "5000"}
