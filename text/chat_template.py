"""A tokenizer's chat template, which renders messages as the text that a model is trained on. Imports no torch.

Templates run in a sandbox with the same features as in `transformers`: trimmed blocks, `raise_exception`,
`strftime_now`, a plain `tojson`, loop controls, and `{% generation %}` around the assistant's turns.
"""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..core.errors import CheckpointError, ConfigError
from .chat_context import MARK, NEW_TURN, NO_CONTEXT, Context, PromptForm
from .template_files import TemplateSources

Message = Mapping[str, Any]
_END: Final = "<tk: the end of the message, \ufdd0>"  # with a code point that no text has
_HAS_MARKS: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# The names of a message's reasoning, any of which a template may read, as `transformers` gives them.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: the whole conversation.
        spans: the [start, stop) ranges of characters of the assistant's turns, ends of turns included.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class _GenerationBlocks(Extension):
    """Compiles `{% generation %} ... {% endgeneration %}` into a call of `MARK`, which each rendering defines."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.Name(MARK, "load"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


class ChatTemplate:
    """A chat template, with the special tokens that it may name.

    Args:
        sources: the templates, and the special tokens that they may name.
        ends: the special tokens; white space that follows one of them is not part of the assistant's turn.

    Raises:
        CheckpointError: a template is not valid Jinja.
    """

    def __init__(self, sources: TemplateSources, ends: Sequence[str] = ()) -> None:
        environment, self._sources = _environment(), sources
        try:
            self._template = environment.from_string(sources.default)
            self._tool_template = environment.from_string(sources.tool_use) if sources.tool_use else self._template
        except jinja2.TemplateError as error:
            raise CheckpointError(f"The chat template is not valid Jinja: {error}.") from error
        self._ends = tuple(ends)

    def render(
        self, messages: Sequence[Message], context: Context = NO_CONTEXT, unlearned: Collection[int] = ()
    ) -> Rendered:
        """Renders a whole conversation and finds the assistant's turns in it.

        If the template does not mark the turns with `{% generation %}`, a turn is the text that its message adds to
        the prompt for it, without white space after a special token.

        Args:
            messages: the conversation, oldest first.
            context: what the conversation has beside them.
            unlearned: the indexes of the assistant's messages whose turns are left out of the spans.

        Raises:
            ConfigError: the template refuses the messages, renders a turn differently once other messages follow, has
                no place for a part of the conversation, or does not show which turn is that of an unlearned message.
        """
        text, marks = self._run(messages, False, context)
        self._check_used(messages, context, text)
        if _HAS_MARKS.search(self._source(context)):
            spans = _without(marks, messages, unlearned, text) if unlearned else marks
        else:
            spans = self._turns(messages, context, unlearned, text)
        return Rendered(text, tuple(spans))

    def prompt(
        self, messages: Sequence[Message], most_characters: int | None = None, form: PromptForm = NEW_TURN
    ) -> str:
        """Renders a conversation up to the start of the assistant's next turn, special tokens spelled out.

        Where the answer continues the last message, the prompt ends with it: what the template puts behind the message
        is cut off, found by a mark at its end.

        Raises:
            ConfigError: the template refuses the messages, makes more characters of them than it may, has no place for
                a variable, or does not show the end of the last message.
        """
        context = Context(variables=form.variables)
        if not form.continues:
            text = self._run(messages, True, context, most_characters)[0]
        else:
            *before, last = messages
            marked = {**last, "content": f"{last.get('content') or ''}{_END}"}
            text, *behind = self._run([*before, marked], False, context, most_characters)[0].split(_END)
            if len(behind) != 1:
                raise ConfigError("the chat template does not show where the last message ends, so it is not continued")
        for name in form.variables:
            if not self._has_name(name, context):
                raise ConfigError(f"the chat template has no variable {name!r}, so it would be lost")
        return text

    def _source(self, context: Context) -> str:
        return self._sources.default if context.tools is None else self._sources.tool_use or self._sources.default

    def _has_name(self, name: str, context: Context) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self._source(context)) is not None

    def _check_used(self, messages: Sequence[Message], context: Context, text: str) -> None:
        """Raises ConfigError if the template ignores tools, documents, variables, calls of tools or reasoning."""
        for names, bare_messages, bare_context in _without_each(messages, context):
            named = any(self._has_name(name, context) for name in names)
            if not named and self._run(bare_messages, False, bare_context)[0] == text:
                raise ConfigError(
                    f'the chat template has no place for "{names[0]}", so it would be lost; use a template that has, '
                    f"or leave the field out, as by --ignore {names[0]}"
                )

    def _turns(
        self, messages: Sequence[Message], context: Context, unlearned: Collection[int], text: str
    ) -> list[tuple[int, int]]:
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant" or number in unlearned:
                continue
            prompt, _ = self._run(messages[:number], True, context)
            so_far, _ = self._run(messages[: number + 1], False, context)
            if not (so_far.startswith(prompt) and text.startswith(so_far)):
                raise ConfigError(
                    f"the chat template renders message {number + 1} differently once other messages follow, so the "
                    "assistant's turns cannot be found in the text; mark them in the template with {% generation %}"
                )
            said = so_far[len(prompt) :]
            bare = said.rstrip()
            spans.append((len(prompt), len(prompt) + len(bare if bare.endswith(self._ends) else said)))
        return spans

    def _run(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        context: Context = NO_CONTEXT,
        most_characters: int | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        written: list[str] = []
        left = sys.maxsize if most_characters is None else most_characters
        spans: list[tuple[int, int]] = []

        def mark(caller: Callable[[], str]) -> str:
            said = caller()
            start = sum(map(len, written))
            spans.append((start, start + len(said)))
            return said

        variables = {
            **self._sources.variables,
            **context.given(),
            "messages": [_given(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            MARK: mark,
        }
        template = self._template if context.tools is None else self._tool_template
        try:
            for piece in template.generate(variables):
                written.append(piece)
                left -= len(piece)
                if left < 0:
                    raise jinja2.TemplateError(f"they become more than {most_characters} characters")
        except MemoryError as error:
            raise ConfigError("the chat template takes too much memory for these messages") from error
        except Exception as error:  # a template is a program: it can raise whatever an expression of Python can
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        return "".join(written), spans


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def _given(message: Message) -> dict[str, Any]:
    """Returns a message as `transformers` gives it to a template: without nulls, its reasoning by each name for it."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _without_each(
    messages: Sequence[Message], context: Context
) -> Iterator[tuple[tuple[str, ...], Sequence[Message], Context]]:
    """Yields each part of a conversation that a template may ignore, by its names, and the conversation without it."""
    if context.tools:
        yield ("tools",), messages, replace(context, tools=[])
    if context.documents:
        yield ("documents",), messages, replace(context, documents=None)
    for name in context.variables:
        rest = {key: value for key, value in context.variables.items() if key != name}
        yield (name,), messages, replace(context, variables=rest)
    for names in (("tool_calls",), _REASONING):
        if any(message.get(name) for message in messages for name in names):
            bare = [{key: value for key, value in message.items() if key not in names} for message in messages]
            yield names, bare, context


def _without(
    marks: list[tuple[int, int]], messages: Sequence[Message], unlearned: Collection[int], text: str
) -> list[tuple[int, int]]:
    """Returns the marked spans without those of unlearned messages, if there is one span for each message."""
    said = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    contents = [str(messages[number].get("content") or "").strip() for number in said]
    if len(said) != len(marks) or not all(
        content in text[start:stop] for content, (start, stop) in zip(contents, marks, strict=True)
    ):
        raise ConfigError(
            "the chat template does not mark the assistant's messages one by one, so the turn of a message of weight 0 "
            "cannot be found in the text"
        )
    return [mark for number, mark in zip(said, marks, strict=True) if number not in unlearned]


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
