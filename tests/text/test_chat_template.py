"""Chat templates: where they are found, what they may do, and where the assistant's turns are."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tk.core.errors import CheckpointError, ConfigError
from tk.text.chat_context import PromptForm
from tk.text.chat_template import ChatTemplate
from tk.text.template_files import TemplateSources, template_sources
from tk.text.tokenizer_files import TextFiles

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. ☃", "name": None},
    {"role": "user", "content": " What is a def?\n"},
    {"role": "assistant", "content": "A function: `def f(x):\n    return x`"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "  You're welcome 😀"},
]


def test_where_templates_are_found(tmp_path: Path) -> None:
    special = {
        "bos_token": {"__type": "AddedToken", "content": "<|start|>"},
        "eos_token": "<|endoftext|>",
        "pad_token": {},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    with pytest.raises(CheckpointError, match=r"neither chat_template\.jinja nor chat_template in tokenizer_config"):
        ChatTemplate(template_sources(TextFiles.read(tmp_path)))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}listed"}]
    odd = [{"name": ["default"], "template": "unhashable"}, {"name": "default", "template": "{{ bos_token }}odd"}]
    for value, expected in (
        ("{{ eos_token }}alone", "<|endoftext|>alone"),
        (named, "<|start|>listed"),
        (odd, "<|start|>odd"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": value}))
        assert ChatTemplate(template_sources(TextFiles.read(tmp_path))).render(MESSAGES[:2]).text == expected
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert ChatTemplate(template_sources(TextFiles.read(tmp_path))).render(MESSAGES[:2]).text == "from its own file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="not valid Jinja"):
        ChatTemplate(template_sources(TextFiles.read(tmp_path)))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must take turns') }}", "roles must take turns"),
        ("{{ messages[7]['content'].strip() }}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{% set _ = messages.append(1) %}", "refuses these messages"),
        ("{{ 1 // 0 }}", "refuses these messages"),
        ("{{ '{}'.format() }}", "refuses these messages"),
        ("{{ 5 | dictsort }}", "refuses these messages"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "refuses these messages"),
        ("{{ messages | length }}", "mark them in the template"),
    ],
)
def test_a_refused_template_is_named(source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ChatTemplate(TemplateSources(source)).render(MESSAGES)


def _turns(source: str, messages: list[dict[str, Any]], ends: tuple[str, ...] = ()) -> list[str]:
    """Returns the text of each of the assistant's turns."""
    rendered = ChatTemplate(TemplateSources(source, variables={"eos_token": "</s>"}), ends).render(messages)
    return [rendered.text[start:stop] for start, stop in rendered.spans]


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]
EACH = "{% for m in messages %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def test_a_turn_is_the_text_that_a_message_adds_to_its_prompt() -> None:
    source = EACH + "{{ m.role }}: {{ m.content }}{{ eos_token }} \n" + PROMPT
    assert _turns(source, CONVERSATION) == ["b</s> \n", "d</s> \n"]
    assert _turns(source, CONVERSATION, ("</s>",)) == ["b</s>", "d</s>"], "no white space after a special token"
    assert _turns(source, CONVERSATION[:1]) == []


def test_marks_in_the_template_are_the_turns() -> None:
    source = EACH + "[{{ m.content }}]{%- generation -%}{{ m.content | upper }}!{%- endgeneration -%}" + "{% endfor %}"
    assert _turns(source, CONVERSATION[:2]) == ["A!", "B!"], "the template decides, whatever the role"


def test_a_turn_that_later_messages_change_cannot_be_found() -> None:
    source = EACH + "{{ m.role }}: {{ m.content if loop.last or m.role == 'user' else '...' }}" + PROMPT
    with pytest.raises(ConfigError, match="message 2 differently once other messages follow"):
        ChatTemplate(TemplateSources(source)).render(CONVERSATION)
    assert _turns(source, CONVERSATION[:2]) == ["b"]


def test_values_that_are_none_are_absent_and_json_keeps_its_letters() -> None:
    source = "{{ messages[0] | tojson }}"
    message = {"role": "user", "content": "<ü>", "name": None}
    assert ChatTemplate(TemplateSources(source)).render([message]).text == '{"role": "user", "content": "<ü>"}'


def test_a_prompt_ends_where_the_answer_begins() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[>]{% endif %}"
    )
    template = ChatTemplate(TemplateSources(source))
    assert template.prompt([{"role": "user", "content": "hi"}]) == "[user]hi[>]"
    assert template.render([{"role": "user", "content": "hi"}]).text == "[user]hi"


@pytest.mark.parametrize("content", ["Sure: ", "", "a</s>\n\tb", "said twice said", "☃ "])
@pytest.mark.parametrize("end", ["{{ eos_token }}\n", "", "{% if not loop.last %}[next]{% endif %}[end]"])
def test_an_answer_continues_the_last_message(content: str, end: str) -> None:
    source = EACH + "[{{ m.role }}] {{ m.content | trim }}" + end + PROMPT
    template = ChatTemplate(TemplateSources(source, variables={"eos_token": "</s>"}))
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    prompt = template.prompt(messages, form=PromptForm(continues=True))
    assert prompt.endswith(f"[assistant] {content.lstrip()}")
    if content:  # transformers does not find the end of an empty message
        oracle, _ = render_jinja_template(
            [messages], chat_template=source, continue_final_message=True, eos_token="</s>"
        )
        assert prompt.rstrip() == oracle[0].rstrip()


def test_a_last_message_without_an_end_is_not_continued() -> None:
    for source in (EACH + "{{ m.content[:3] }}{% endfor %}", EACH + "{{ m.content }}{{ m.content }}{% endfor %}"):
        with pytest.raises(ConfigError, match="does not show where the last message ends"):
            ChatTemplate(TemplateSources(source)).prompt(CONVERSATION[:2], form=PromptForm(continues=True))


def test_variables_of_a_prompt() -> None:
    template = ChatTemplate(TemplateSources("{{ 'thinks' if enable_thinking else 'says' }}"))
    assert template.prompt(CONVERSATION, form=PromptForm(variables={"enable_thinking": True})) == "thinks"
    assert template.prompt(CONVERSATION, form=PromptForm(variables={"enable_thinking": False})) == "says"
    with pytest.raises(ConfigError, match="no variable 'enable_thought'"):
        template.prompt(CONVERSATION, form=PromptForm(variables={"enable_thought": True}))
