"""Conversations on the wire, there and back, and variables that are none."""

import pytest

from tk.core.errors import InvalidRequest
from tk.infer.client.chat_wire import chat_from_wire, chat_to_wire
from tk.infer.engine.request.prompts import Conversation
from tk.proto.v1 import generation_pb2 as pb

HI = [{"role": "user", "content": "hi ☃"}, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    "chat", [Conversation(HI), Conversation(HI, continues=True), Conversation(HI, variables={"a": [None, {"ü": 1}]})]
)
def test_a_conversation_comes_back(chat: Conversation) -> None:
    assert chat_from_wire(pb.Chat.FromString(chat_to_wire(chat).SerializeToString())) == chat


@pytest.mark.parametrize(
    "variables", ["{", "[]", "5", "[" * 100_000, '{"messages": []}', '{"add_generation_prompt": 1}']
)
def test_wrong_variables_are_refused(variables: str) -> None:
    message = pb.Chat(messages=[pb.ChatMessage(**each) for each in HI], variables=variables)
    with pytest.raises(InvalidRequest) as error:
        chat_from_wire(message)
    assert error.value.field == "variables"


def test_a_message_of_the_user_is_not_continued() -> None:
    with pytest.raises(InvalidRequest, match="role 'user'; only one of the assistant's can be continued"):
        chat_from_wire(pb.Chat(messages=[pb.ChatMessage(**HI[0])], continues=True))
