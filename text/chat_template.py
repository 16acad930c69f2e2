"""A tokenizer's chat template, which renders messages as the text that a model is trained on. Imports no torch.

Templates run in a sandbox with the same features as in `transformers`: trimmed blocks, `raise_exception`,
`strftime_now`, a plain `tojson`, loop controls, and `{% generation %}` around the assistant's turns.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..core.errors import CheckpointError, ConfigError
from .tokenizer_files import CONFIG_FILE, TEMPLATE_FILE, read_json

Message = Mapping[str, Any]
_MARK: Final = "tk_generation"  # the function that a template's generation blocks call
_HAS_MARKS: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
    """Compiles `{% generation %} ... {% endgeneration %}` into a call of `_MARK`, which each rendering defines."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.Name(_MARK, "load"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


class ChatTemplate:
    """A chat template, with the special tokens that it may name.

    Args:
        source: the template, in Jinja.
        variables: the special tokens by the name that the template may use, `bos_token` for example.
        ends: the special tokens; white space that follows one of them is not part of the assistant's turn.

    Raises:
        CheckpointError: `source` is not valid Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, str], ends: Sequence[str] = ()) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"The chat template is not valid Jinja: {error}.") from error
        self._variables = dict(variables)
        self._ends = tuple(ends)
        self._marked = _HAS_MARKS.search(source) is not None

    @classmethod
    def from_folder(cls, folder: Path, ends: Sequence[str] = ()) -> Self:
        """Reads chat_template.jinja, or if it does not exist, `chat_template` of tokenizer_config.json.

        Args:
            folder: the tokenizer's folder.
            ends: the special tokens; see `ChatTemplate`.

        Raises:
            CheckpointError: neither exists, or the template is not valid Jinja.
        """
        config = read_json(folder / CONFIG_FILE)
        source = _source(folder, config)
        found = {name: config.get(name) for name in _SPECIAL}
        variables = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
        return cls(source, {name: token for name, token in variables.items() if isinstance(token, str)}, ends)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Renders a whole conversation and finds the assistant's turns in it.

        If the template does not mark the turns with `{% generation %}`, a turn is the text that its message adds to
        the prompt for it, without white space after a special token.

        Raises:
            ConfigError: the template refuses the messages, or renders a turn differently once other messages follow.
        """
        text, marks = self._run(messages, False)
        spans = marks if self._marked else self._turns(messages, text)
        return Rendered(text, tuple(spans))

    def prompt(self, messages: Sequence[Message], most_characters: int | None = None) -> str:
        """Renders a conversation up to the start of the assistant's next turn, special tokens spelled out.

        Raises:
            ConfigError: the template refuses the messages, or makes more characters of them than it may.
        """
        return self._run(messages, True, most_characters)[0]

    def _turns(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt, _ = self._run(messages[:number], True)
            so_far, _ = self._run(messages[: number + 1], False)
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
        self, messages: Sequence[Message], add_generation_prompt: bool, most_characters: int | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        written: list[str] = []
        left = sys.maxsize if most_characters is None else most_characters
        spans: list[tuple[int, int]] = []

        def mark(caller: Callable[[], str]) -> str:
            said = caller()
            start = sum(map(len, written))
            spans.append((start, start + len(said)))
            return said

        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            for piece in self._template.generate(
                **self._variables,
                messages=given,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{_MARK: mark},
            ):
                written.append(piece)
                left -= len(piece)
                if left < 0:
                    raise jinja2.TemplateError(f"they become more than {most_characters} characters")
        except MemoryError as error:
            raise ConfigError("the chat template takes too much memory for these messages") from error
        except Exception as error:  # a template is a program: it can raise whatever an expression of Python can
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        return "".join(written), spans


def _source(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"Cannot read {path}: {error}.") from error
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[-1].get("template") if named else None
    if not isinstance(found, str):
        raise CheckpointError(
            f"{folder} has no chat template, neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE}: add one, "
            "which conversations need."
        )
    return found


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
