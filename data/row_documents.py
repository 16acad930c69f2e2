"""The documents of rows of each shape, of which data/row_shapes.py has the list."""

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from ..core.errors import ConfigError
from ..text.chat_context import RESERVED, Context
from .examples import Chat, Document, PromptResponse
from .messages import Messages, read_messages
from .row_fields import is_neutral, refusal_in_row

# The fields of a row that go through a chat template beside its messages.
CONTEXT: Final = ("tools", "documents", "chat_template_kwargs")


def _string(fields: Mapping[str, Any], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        problem = "is missing" if value is None else f"is {type(value).__name__}"
        raise ConfigError(f'{where}: "{name}" must be a string, but it {problem}.')
    return value


def read_text(fields: Mapping[str, Any], where: str, _ignored: Collection[str]) -> Document | None:
    """Returns a text; None if it is empty."""
    return _string(fields, "text", where) or None


def read_prompt(fields: Mapping[str, Any], where: str, ignored: Collection[str]) -> Document | None:
    """Returns a prompt with its response, each a string or messages; None if both are empty."""
    answers = [name for name in ("response", "completion") if name in fields]
    if len(answers) > 1:
        raise ConfigError(f'{where}: the row has both "response" and "completion". Leave one out: --ignore completion.')
    answer = answers[0] if answers else "response"
    if isinstance(fields.get("prompt"), list) and isinstance(fields.get(answer), list):
        return _prompt_of_messages(fields, answer, where, ignored)
    for name in CONTEXT:
        if not is_neutral(name, fields.get(name)):
            raise ConfigError(f'{where}: "{name}" {refusal_in_row(name, True)}.')
    example = PromptResponse(_string(fields, "prompt", where), _string(fields, answer, where))
    return example if example.text else None


def _prompt_of_messages(fields: Mapping[str, Any], answer: str, where: str, ignored: Collection[str]) -> Chat:
    prompt = read_messages(fields["prompt"], "prompt", where, ignored)
    said = read_messages(fields[answer], answer, where, ignored)
    before = len(prompt.given)
    unlearned = {index for index, message in enumerate(prompt.given) if message["role"] == "assistant"}
    unlearned |= {index + before for index in said.unlearned}
    return _chat(Messages((*prompt.given, *said.given), frozenset(unlearned)), fields, where)


def read_chat(fields: Mapping[str, Any], where: str, ignored: Collection[str]) -> Document | None:
    """Returns the conversation of a row with messages."""
    return _chat(read_messages(fields["messages"], "messages", where, ignored), fields, where)


def read_sharegpt(fields: Mapping[str, Any], where: str, ignored: Collection[str]) -> Document | None:
    """Returns the conversation of a row in ShareGPT's form."""
    found = read_messages(fields["conversations"], "conversations", where, ignored)
    return _chat(_after_system(found, fields, where), fields, where)


def read_alpaca(fields: Mapping[str, Any], where: str, _ignored: Collection[str]) -> Document | None:
    """Returns the conversation of two messages of a row in Alpaca's form."""
    asked, more = _string(fields, "instruction", where), fields.get("input", "")
    if not isinstance(more, str):
        raise ConfigError(f'{where}: "input" must be a string.')
    question = {"role": "user", "content": f"{asked}\n{more}" if more else asked}
    answer = {"role": "assistant", "content": _string(fields, "output", where)}
    return _chat(_after_system(Messages((question, answer), frozenset()), fields, where), fields, where)


def _after_system(messages: Messages, fields: Mapping[str, Any], where: str) -> Messages:
    """Returns the messages behind the row's own system message, if it has one."""
    if is_neutral("system", fields.get("system")):
        return messages
    if messages.given[0]["role"] == "system":
        raise ConfigError(f'{where}: the row has "system" and a system message too. Leave one out: --ignore system.')
    system = {"role": "system", "content": _string(fields, "system", where)}
    return Messages((system, *messages.given), frozenset(index + 1 for index in messages.unlearned))


def _chat(messages: Messages, fields: Mapping[str, Any], where: str) -> Chat:
    tools, documents = (_objects(fields.get(name), name, where) for name in ("tools", "documents"))
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise ConfigError(f'{where}: "chat_template_kwargs" must be an object.')
    taken = sorted(RESERVED & variables.keys())
    if taken:
        raise ConfigError(f'{where}: "chat_template_kwargs" cannot have "{taken[0]}", which the row itself gives.')
    return Chat(messages.given, where, Context(tools, documents, variables), messages.unlearned)


def _objects(value: object, name: str, where: str) -> list[dict[str, Any]] | None:
    """Returns a list of objects, which data sets of a fixed schema hold as a string of JSON; None if there is none."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f'{where}: "{name}" is a string that is not valid JSON: {error}.') from error
    if value is None or value == "":
        return None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ConfigError(f'{where}: "{name}" must be a list of objects.')
    return value
