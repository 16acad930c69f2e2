"""Conversations rendered by a process of their own: what comes back, and the limits of time, memory and text."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import CheckpointError, ConfigError, TkError
from tk.text.chat_renderer import ChatRenderer
from tk.text.chat_template import ChatTemplate

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
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "chat_template.jinja").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens renderers that are closed at the end."""
    renderers: list[ChatRenderer] = []

    def make(folder: Path, most_seconds: float = 0.3) -> ChatRenderer:
        renderers.append(ChatRenderer(folder, most_seconds))
        return renderers[-1]

    yield make
    for renderer in renderers:
        renderer.close()


def test_a_prompt_is_that_of_the_template(folder: Path, opened: Open) -> None:
    renderer = opened(folder)
    prompts = [renderer.submit(messages, 1000) for messages in (MESSAGES, MESSAGES[1:], MESSAGES[:1])]
    template = ChatTemplate.from_folder(folder)
    expected = [template.prompt(messages) for messages in (MESSAGES, MESSAGES[1:], MESSAGES[:1])]
    assert [prompt.result(WAIT_SECONDS) for prompt in prompts] == expected
    assert expected[1] == "</s>[system]"
    large = [{"role": "user", "content": "ü" * (2 << 20)}]
    assert renderer.submit(large, 4 << 20).result(WAIT_SECONDS) == "</s>[user]" + "ü" * (2 << 20)


def test_a_hostile_template_ends_with_an_error_and_the_next_prompt_is_served(folder: Path, opened: Open) -> None:
    renderer = opened(folder)
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


@pytest.mark.parametrize("source", [None, "{% if %}"])
def test_a_template_that_cannot_be_read_is_a_checkpoint_error(folder: Path, opened: Open, source: str | None) -> None:
    (folder / "chat_template.jinja").unlink()
    if source is not None:
        (folder / "chat_template.jinja").write_text(source)
    renderer = opened(folder)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="chat template"):
            renderer.submit(MESSAGES, 1000).result(WAIT_SECONDS)


def test_a_template_that_takes_for_ever_to_compile_ends_with_an_error(folder: Path, opened: Open) -> None:
    (folder / "chat_template.jinja").write_text("{{ 10 ** 1000000000 }}")
    renderer = opened(folder)
    for _ in range(2):
        with pytest.raises(ConfigError, match="too long"):
            renderer.submit(MESSAGES, 1000).result(WAIT_SECONDS)


def test_closing_does_not_wait_for_a_template(folder: Path, opened: Open) -> None:
    renderer = opened(folder, 1000.0)
    assert renderer.submit(MESSAGES[1:], 1000).result(WAIT_SECONDS) == "</s>[system]"
    hostile = renderer.submit([{"role": "user", "content": "loop"}], 1000)
    while not hostile.running():
        pass
    renderer.close()
    with pytest.raises(TkError, match="exit code -9"):
        hostile.result(WAIT_SECONDS)
