"""Messages of a chat: contents as text and parts, names, and assistants that said nothing."""

from typing import Any

import pytest

from tk.infer.engine.request.prompts import Conversation
from tk.infer.serve.http.json_body import Fields
from tk.infer.serve.openai.chat_messages import take_messages


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "user", "content": "hi", "name": "ann"}, "hi"),
        ({"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, "hi"),
        ({"role": "user", "content": [{"type": "text"}]}, ""),
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant", "content": None, "tool_calls": [], "refusal": None}, ""),
    ],
)
def test_contents(message: dict[str, Any], content: str) -> None:
    assert take_messages(Fields({"messages": [message]})) == Conversation(
        [{"role": message["role"], "content": content}]
    )
