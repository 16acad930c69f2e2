"""A tokenizer's chat template: messages to the text that the model was, or will be, trained on. Imports no torch.

Rendered in a sandbox, by the rules that `transformers` has made the standard: blocks trimmed, `raise_exception`,
`strftime_now`, a plain `tojson`, loop controls, and `{% generation %}` around what the assistant says.
"""

import json
import re
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
from .tokenizer import CONFIG_FILE, TEMPLATE_FILE, read_json

Message = Mapping[str, Any]
_MARK: Final = "tk_generation"  # the variable by which a template's generation blocks report
_HAS_MARKS: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text; `spans` are the [start, stop) characters that the assistant says, ends of turns too."""

    text: str
    spans: tuple[tuple[int, int], ...]


class _GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}`: a call of the render's own `_MARK` with the block as its caller."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.Name(_MARK, "load"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


class ChatTemplate:
    """One template with the special tokens that it may name.

    Args:
        source: Jinja.
        variables: `bos_token` and such.
        ends: special tokens: white space that follows one of them is not the assistant's.
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
            raise CheckpointError(f"The chat template is no valid Jinja: {error}.") from error
        self._variables = dict(variables)
        self._ends = tuple(ends)
        self._marked = _HAS_MARKS.search(source) is not None

    @classmethod
    def from_folder(cls, folder: Path, ends: Sequence[str] = ()) -> Self:
        """Reads chat_template.jinja, or where there is none, `chat_template` of tokenizer_config.json.

        Raises:
            CheckpointError: there is neither, or it is no valid template.
        """
        config = read_json(folder / CONFIG_FILE)
        source = _source(folder, config)
        found = {name: config.get(name) for name in _SPECIAL}
        variables = {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}
        return cls(source, {name: token for name, token in variables.items() if isinstance(token, str)}, ends)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A whole conversation and where the assistant speaks in it.

        Where the template does not mark that with `{% generation %}`, a turn is what its message adds to the prompt for
        it, less white space after a special token.

        Raises:
            ConfigError: the template refuses the messages, or shows a turn otherwise once more follow.
        """
        text, marks = self._run(messages, False)
        spans = marks if self._marked else self._turns(messages, text)
        return Rendered(text, tuple(spans))

    def _turns(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt, _ = self._run(messages[:number], True)
            so_far, _ = self._run(messages[: number + 1], False)
            if not (so_far.startswith(prompt) and text.startswith(so_far)):
                raise ConfigError(
                    f"the chat template shows message {number + 1} in another way once others follow, so what the "
                    "assistant says cannot be told from the text; mark it in the template with {% generation %}"
                )
            said = so_far[len(prompt) :]
            bare = said.rstrip()
            spans.append((len(prompt), len(prompt) + len(bare if bare.endswith(self._ends) else said)))
        return spans

    def _run(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        written: list[str] = []
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
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
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
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise CheckpointError(
            f"{folder} has no chat template, neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE}: put one there "
            "to use messages, or prepare prompt and response."
        )
    return found


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
