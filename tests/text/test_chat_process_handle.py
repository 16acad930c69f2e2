"""A process that renders: its answers, and the ways in which it ends."""

import itertools
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tk.tests.child_processes import child_ids, command_of
from tk.text import chat_process_handle
from tk.text.chat_process_handle import ChatProcess, ChatProcessEnded
from tk.text.template_files import TemplateSources

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SOURCE = (
    "{% if messages[0].content == 'loop' %}" + LOOP + "{% else %}{{ eos_token }}{{ messages[0].content }}{% endif %}"
)
Open = Callable[..., ChatProcess]


def request(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "most_characters": 4 << 20, "form": {}}


@pytest.fixture
def opened() -> Iterator[Open]:
    processes: list[ChatProcess] = []

    def make(cpu_seconds: float = 1000.0, wall_seconds: float = 60.0) -> ChatProcess:
        processes.append(
            ChatProcess(TemplateSources(SOURCE, variables={"eos_token": "</s>"}), cpu_seconds, wall_seconds)
        )
        processes[-1].get_ready()
        return processes[-1]

    yield make
    for process in processes:
        process.end()


def child() -> int:
    """The process id of the only child of this process that renders."""
    [process] = [each for each in child_ids() if b"chat_process" in command_of(each)]
    return process


def test_questions_are_answered_one_after_the_other(opened: Open) -> None:
    process, slow = opened(), []
    assert process.ask(request("a"), 60.0, lambda: slow.append("a")) == {"text": "</s>a"}
    large = "ü" * (1 << 20)
    assert process.ask(request(large), 60.0, lambda: slow.append("b")) == {"text": f"</s>{large}"}
    assert "error" in process.ask(request("a") | {"most_characters": 1}, 60.0, lambda: slow.append("c"))
    assert slow == []


def test_one_that_takes_too_much_time_of_the_cpu_says_so(opened: Open) -> None:
    process, slow = opened(cpu_seconds=0.2), []
    with pytest.raises(ChatProcessEnded, match=f"signal {signal.SIGPROF.value}") as end:
        process.ask(request("loop"), 0.01, lambda: slow.append("loop"))
    assert end.value.took_too_long
    assert slow == ["loop"]


def test_one_that_computes_on_a_busy_machine_does_not_hang(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    process = opened(wall_seconds=1.0)

    def clock() -> float:
        return 4 * process._cpu_time()  # as if others had three quarters of the time

    monkeypatch.setattr(chat_process_handle, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(chat_process_handle, "_COMPUTING", 0.0002)  # 0.2 of 1000 s, of which it takes 0.25
    with pytest.raises(ChatProcessEnded, match="did not answer within 1 s") as end:
        process.ask(request("loop"))
    assert end.value.took_too_long


def test_the_time_in_which_the_asking_process_is_stopped_does_not_count(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, hours = opened(wall_seconds=60.0), itertools.count(step=3600)
    monkeypatch.setattr(chat_process_handle, "time", SimpleNamespace(monotonic=lambda: float(next(hours))))
    assert process.ask(request("a")) == {"text": "</s>a"}


def test_the_start_has_a_time_of_its_own(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(wall_seconds=0.001)  # less than a start takes
    monkeypatch.setattr(chat_process_handle, "START_SECONDS", 0.0)
    with pytest.raises(ChatProcessEnded, match="did not answer within 0 s"):
        opened()


@pytest.mark.parametrize("content", ["a", pytest.param("a" * (1 << 20), marks=pytest.mark.matrix)])
def test_one_that_is_stopped_is_ended(opened: Open, content: str) -> None:
    process = opened(wall_seconds=1.5)
    os.kill(stopped := child(), signal.SIGSTOP)
    with pytest.raises(ChatProcessEnded, match=r"did not answer within 1\.5 s") as end:
        process.ask(request(content))
    assert not end.value.took_too_long
    assert not Path(f"/proc/{stopped}").exists()


def test_one_that_is_killed_while_it_answers_ends_the_question(opened: Open) -> None:
    process = opened()
    with pytest.raises(ChatProcessEnded, match="killed by signal 9"):
        process.ask(request("loop"), 0.01, threading.Thread(target=process.kill).start)
    assert process.is_killed


def test_one_that_the_system_cannot_start_has_ended() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(ChatProcessEnded, match="could not be started"):
            ChatProcess(TemplateSources(""), 1.0, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
