"""The text of an error for its caller."""

from tk.core.errors import InvalidRequest
from tk.infer.serve.errors import MAX_MESSAGE_BYTES, text_for_client


def test_a_long_message_is_cut_to_the_room_in_headers() -> None:
    text = text_for_client(InvalidRequest("ü" * 100_000))
    assert MAX_MESSAGE_BYTES - 4 <= len(text.encode()) <= MAX_MESSAGE_BYTES
    assert text.endswith("ü...")


def test_the_text_of_a_defect_stays_in_the_log() -> None:
    assert text_for_client(ZeroDivisionError("secret")) == "A fault of the server (ZeroDivisionError); see its log."
