"""The record of sessions: each call has its answer, ids and times are left out, and frames come whole."""

from tk.benchmarks.compare_sessions import CONTINUATION, DATA, HEADERS, PADDED, PRIORITY, Talk, blanked, frames, http1

END_HEADERS = 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def test_each_request_of_a_connection_is_beside_its_answer() -> None:
    up = b"GET /a HTTP/1.1\r\nHost: 127.0.0.1:50\r\n\r\nPOST /b HTTP/1.1\r\n\r\n{}"
    down = b"HTTP/1.1 200 \r\ndate: today\r\n\r\nHTTP/1.1 400 \r\n\r\n"
    first, second = http1(Talk(bytearray(up), bytearray(down)))
    assert first[:2] == ["> b'GET /a HTTP/1.1\\r\\n'", "> b'Host: 127.0.0.1:-\\r\\n'"]
    assert first[-2:] == ["< b'date: -\\r\\n'", "< b'\\r\\n'"]
    assert (second[0], second[-2]) == ("> b'POST /b HTTP/1.1\\r\\n'", "< b'HTTP/1.1 400 \\r\\n'")


def test_ids_and_times_are_left_out_and_nothing_else() -> None:
    said = b'{"id": "chatcmpl-1", "created": 17, "total_seconds": 1.5e-3, "seed": 7, "text": "id"}'
    assert blanked(said) == b'{"id": "-", "created": 0, "total_seconds": -, "seed": 7, "text": "id"}'


def test_frames_come_without_padding_and_with_their_headers_whole() -> None:
    padded = frame(HEADERS, PADDED | PRIORITY, 1, b"\2" + bytes(5) + b"one" + bytes(2))
    content = padded + frame(CONTINUATION, END_HEADERS, 1, b"two") + frame(DATA, 0, 1, b"three") + b"\0\0\7"
    assert list(frames(content)) == [(HEADERS, 1, b"onetwo"), (DATA, 1, b"three")]
