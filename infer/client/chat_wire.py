"""Conversations on the wire."""

import json

from ...core.errors import InvalidRequest
from ...proto.v1 import generation_pb2 as pb
from ..engine.request.prompts import Conversation


def chat_to_wire(chat: Conversation) -> pb.Chat:
    """Returns the message of a conversation.

    Raises:
        ValueError, TypeError: a text or a variable cannot be sent.
    """
    variables = json.dumps(dict(chat.variables)) if chat.variables else ""
    messages = [pb.ChatMessage(**each) for each in chat.messages]
    return pb.Chat(messages=messages, continues=chat.continues, variables=variables)


def chat_from_wire(message: pb.Chat) -> Conversation:
    """Returns the conversation of a message.

    Raises:
        InvalidRequest: it is a wrong conversation, or its variables are no JSON object.
    """
    try:
        variables = json.loads(message.variables or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"variables are no JSON: {error}.", field="variables") from error
    if not isinstance(variables, dict):
        raise InvalidRequest(f"variables are a JSON {type(variables).__name__}; they must be an object.", "variables")
    messages = [{"role": each.role, "content": each.content} for each in message.messages]
    return Conversation(messages, message.continues, variables)
