"""Texts of gRPC for a server that is not reached; tests/cli/test_mistakes.py meets the usual ones for real."""

import pytest

from tk.infer.client.reached import advice_for, explained

FAILED = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("UNKNOWN: ipv4:1.2.3.4:5: Failed to connect to remote host: Connection refused", "no server listens there"),
        ("UNAVAILABLE: ipv4:1.2.3.4:5: Socket closed", "ended the connection at once"),
        ("UNKNOWN: ipv4:1.2.3.4:5: Tls handshake failed: WRONG_VERSION_NUMBER: Invalid", "is not encrypted"),
        ("UNKNOWN: Tls handshake failed: CERTIFICATE_VERIFY_FAILED: unable to get", "not of an authority"),
        ("UNKNOWN: Hostname Verification Check failed.", "for another name"),
        ("UNAVAILABLE: Failed parsing HTTP/2 (Expected SETTINGS frame)", "not in gRPC"),
        ("UNKNOWN: ipv4:1.2.3.4:5: connect: No route to host", "no answer came from there"),
        ("UNKNOWN: something new", FAILED),
    ],
)
def test_a_cause_is_named(text: str, cause: str) -> None:
    assert cause in explained(FAILED + text)


def test_a_name_that_no_machine_has() -> None:
    assert "no machine has that name" in explained("errors resolving nowhere:1: [address lookup failed]")


@pytest.mark.parametrize("text", ["The server is draining.", "Connection refused by the model's owner."])
def test_the_words_of_a_server_stay(text: str) -> None:
    assert explained(text) == text


def test_advice_follows_statuses_without_a_reason() -> None:
    assert "TK_TOKEN" in advice_for("UNAUTHENTICATED")
    assert advice_for("NOT_FOUND") == ""
