"""The messages of a call of /v1/chat/completions as a conversation."""

from typing import Final

from ....core.errors import InvalidRequest
from ...engine.request.prompts import Conversation
from ..http.json_body import Fields

_NOT_BUILT: Final = frozenset(("audio", "function_call", "refusal", "tool_call_id", "tool_calls"))


def take_messages(fields: Fields) -> Conversation:
    """Takes the messages of a call, whose content is text.

    A message's name is read and changes nothing: templates know roles only.

    `continue_final_message`, `add_generation_prompt` and `chat_template_kwargs` are fields of other servers.

    Raises:
        InvalidRequest: a message has no role or content, a part that is no text, or a field that is not built.
    """
    messages = list[dict[str, str]]()
    for message in fields.objects("messages"):
        role = message.text("role")
        if role is None:
            raise message.wrong("role", None, "system, user or assistant")
        message.text("name")
        message.only("tool_calls", [])
        messages.append({"role": role, "content": _content(message, role)})
        message.refuse_rest(_NOT_BUILT)
    continues, begins = fields.flag("continue_final_message"), fields.anything("add_generation_prompt")
    if begins not in (None, not continues):
        raise fields.wrong("add_generation_prompt", begins, f"{str(not continues).lower()}, or unset")
    variables = fields.anything("chat_template_kwargs")
    if not isinstance(variables, dict | None):
        raise fields.wrong("chat_template_kwargs", variables, "an object of the template's variables")
    try:
        return Conversation(messages, continues, variables or {})
    except InvalidRequest as error:
        raise error.renamed("chat_template_kwargs" if error.field == "variables" else error.field) from error


def _content(message: Fields, role: str) -> str:
    """Takes the content of a message: a text, or parts of text; an assistant may have said nothing."""
    value = message.anything("content")
    if value is None and role == "assistant":
        return ""
    if value is None:
        raise message.wrong("content", None, "a string or a list of parts")
    if not isinstance(value, list):
        return message.as_text(value, "content")
    texts = []
    for part in Fields({"content": value}, message.path).objects("content"):
        kind = part.text("type")
        if kind != "text":
            raise part.wrong("type", kind, "text, the only kind of part that is built")
        texts.append(part.text("text") or "")
        part.refuse_rest()
    return "".join(texts)
