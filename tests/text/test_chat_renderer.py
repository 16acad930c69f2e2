"""Conversations rendered by a process of their own: what comes back, and the limits of time, memory and text."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import CheckpointError, ConfigError, WorkerDied
from tk.tests.child_processes import child_ids, command_of
from tk.text.chat_renderer import MOST_PROCESSES, ChatRenderer
from tk.text.chat_template import ChatTemplate
from tk.text.template_files import TemplateSources

WAIT_SECONDS = 60.0
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": 'grüße "☃"\n\u2028'}, {"role": "system", "content": ""}]
HOSTILE = {
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ (9 + n) ** 1000000000 }}",
    "times": "{{ 'a' * n * 10 ** 10 }}",
    "twice": "{% set ns = namespace(x='ab') %}{% for a in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "width": "{{ '%99999999999d' % n }}",
    "text": "{% for a in range(1000) %}abcdef{% endfor %}",
    "refused": "{{ raise_exception('be polite') }}",
}
# Of constants alone, Jinja would compute them as it compiles the template.
SOURCE = "{% set kind = messages[0].content %}{% set n = messages | length %}" + "".join(
    f"{{% {'el' * bool(number)}if kind == '{kind}' %}}{source}" for number, (kind, source) in enumerate(HOSTILE.items())
)
SOURCE += "{% else %}{{ eos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% endif %}"

Open = Callable[..., ChatRenderer]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens renderers that are closed at the end."""
    renderers: list[ChatRenderer] = []

    def make(source: str = SOURCE, most_seconds: float = 0.3, most_wait: float = 20.0) -> ChatRenderer:
        sources = TemplateSources(source, variables={"eos_token": "</s>"})
        renderers.append(ChatRenderer(sources, most_seconds, most_wait))
        return renderers[-1]

    yield make
    for renderer in renderers:
        renderer.close()


def test_a_prompt_is_that_of_the_template(opened: Open) -> None:
    renderer = opened()
    prompts = [renderer.submit(messages, 1000) for messages in (MESSAGES, MESSAGES[1:], MESSAGES[:1])]
    template = ChatTemplate(TemplateSources(SOURCE, variables={"eos_token": "</s>"}))
    expected = [template.prompt(messages) for messages in (MESSAGES, MESSAGES[1:], MESSAGES[:1])]
    assert [prompt.result(WAIT_SECONDS) for prompt in prompts] == expected
    assert expected[1] == "</s>[system]"
    large = [{"role": "user", "content": "ü" * (2 << 20)}]
    assert renderer.submit(large, 4 << 20).result(WAIT_SECONDS) == "</s>[user]" + "ü" * (2 << 20)


def test_a_hostile_template_ends_with_an_error_and_the_next_prompt_is_served(opened: Open) -> None:
    renderer = opened()
    for kind, words in (
        ("loop", "too long"),
        ("power", "too long"),
        ("times", "too much memory"),
        ("twice", "too much memory|too long"),
        ("width", "too much memory"),
        ("text", "more than 4000 characters"),
        ("refused", "be polite"),
    ):
        hostile = renderer.submit([{"role": "user", "content": kind}], 4000)
        behind = renderer.submit(MESSAGES[1:], 4000)
        with pytest.raises(ConfigError, match=words):
            hostile.result(WAIT_SECONDS)
        assert behind.result(WAIT_SECONDS) == "</s>[system]", kind


def test_a_template_that_cannot_be_compiled_is_a_checkpoint_error(opened: Open) -> None:
    renderer = opened("{% if %}")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="chat template"):
            renderer.submit(MESSAGES, 1000).result(WAIT_SECONDS)


def test_a_template_that_takes_for_ever_to_compile_ends_with_an_error(opened: Open) -> None:
    renderer = opened("{{ 10 ** 1000000000 }}")
    for _ in range(2):
        with pytest.raises(ConfigError, match="too long"):
            renderer.submit(MESSAGES, 1000).result(WAIT_SECONDS)


def asked(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": kind}]


def rendering(known: Collection[int] = ()) -> int:
    """The process id of a child of this process that renders, and is none of the known ones, once there is one."""
    while True:
        for process in child_ids():
            if b"chat_process" in command_of(process) and process not in known:
                return process


def test_closing_does_not_wait_for_a_template(opened: Open) -> None:
    renderer = opened(most_seconds=1000.0)
    assert renderer.submit(MESSAGES[1:], 1000).result(WAIT_SECONDS) == "</s>[system]"
    hostile = [renderer.submit(asked("loop"), 1000, principal) for principal in "abcdef"]
    renderer.close()
    for each in hostile:
        with pytest.raises(WorkerDied, match="server ended"):
            each.result(WAIT_SECONDS)


def test_slow_conversations_hold_up_no_others(opened: Open) -> None:
    renderer = opened(most_seconds=1000.0, most_wait=1000.0)
    slow = [renderer.submit(asked("loop"), 1000, "alice") for _ in range(20)]
    quick = [renderer.submit(MESSAGES[1:], 1000, principal) for principal in ("bob", "", "bob")]
    assert [each.result(WAIT_SECONDS) for each in quick] == ["</s>[system]"] * 3
    while renderer._num_slow < MOST_PROCESSES - 1:
        pass
    own = renderer.submit(MESSAGES[1:], 1000, "alice")
    assert not any(each.done() for each in (*slow, own)), "alice has all that she may have, and waits for herself"
    for each in slow:
        assert each.cancel()
    assert own.result(WAIT_SECONDS) == "</s>[system]", "what nobody waits for is stopped"


def test_one_slow_conversation_holds_up_no_others_of_its_caller(opened: Open) -> None:
    renderer = opened(most_seconds=1000.0, most_wait=1000.0)
    slow = [renderer.submit(asked("loop"), 1000) for _ in range(2)]
    assert [renderer.submit(MESSAGES[1:], 1000).result(WAIT_SECONDS) for _ in range(5)] == ["</s>[system]"] * 5
    assert not any(each.done() for each in slow)


@pytest.mark.parametrize("kill", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.matrix)])
def test_a_process_that_others_kill_is_replaced(opened: Open, kill: signal.Signals) -> None:
    renderer = opened(most_seconds=1000.0, most_wait=1000.0)
    assert renderer.submit(MESSAGES[1:], 1000).result(WAIT_SECONDS) == "</s>[system]"
    os.kill(first := rendering(), kill)
    assert renderer.submit(MESSAGES[1:], 1000).result(WAIT_SECONDS) == "</s>[system]"
    hostile = renderer.submit(asked("loop"), 1000)
    os.kill(second := rendering({first}), kill)
    os.kill(rendering({first, second}), kill)
    with pytest.raises(WorkerDied, match=f"killed by signal {kill.value}, and another one was killed") as died:
        hostile.result(WAIT_SECONDS)
    assert died.value.grpc_status == "UNAVAILABLE"
    assert died.value.retry_after is not None
    assert renderer.submit(MESSAGES[1:], 1000).result(WAIT_SECONDS) == "</s>[system]"


def test_a_process_that_is_stopped_is_replaced(opened: Open) -> None:
    renderer = opened(most_wait=2.0)
    assert renderer.submit(MESSAGES[1:], 1000).result(WAIT_SECONDS) == "</s>[system]"
    os.kill(stopped := rendering(), signal.SIGSTOP)
    large = [{"role": "user", "content": "a" * (1 << 20)}]  # more than it takes without reading
    for messages, expected in ((large, "</s>[user]" + "a" * (1 << 20)), (MESSAGES[1:], "</s>[system]")):
        assert renderer.submit(messages, 2 << 20).result(WAIT_SECONDS) == expected
    assert not Path(f"/proc/{stopped}").exists()


@pytest.mark.matrix
def test_a_conversation_whose_processes_hang_is_unavailable(opened: Open) -> None:
    renderer = opened(most_seconds=1000.0, most_wait=1.0)
    with pytest.raises(WorkerDied, match="did not answer within 1 s, and another one did not answer"):
        renderer.submit(asked("loop"), 1000).result(WAIT_SECONDS)
    assert renderer.submit(MESSAGES[1:], 1000).result(WAIT_SECONDS) == "</s>[system]"


def test_no_process_is_left_and_one_is_kept(opened: Open) -> None:
    renderer = opened(most_seconds=1000.0, most_wait=1000.0)
    slow = [renderer.submit(asked("loop"), 1000, principal) for principal in "abcd"]
    assert renderer.submit(MESSAGES[1:], 1000, "e").cancel()
    for each in slow:
        each.cancel()
    assert renderer.submit(MESSAGES[1:], 1000, "e").result(WAIT_SECONDS) == "</s>[system]"
    while sum(thread.name == "tk-chat" for thread in threading.enumerate()) > 1:
        pass
    renderer.close()
    assert not any(thread.name == "tk-chat" for thread in threading.enumerate())
