"""Malformed calls over HTTP and gRPC that contain a word of their caller's in every place that can hold one."""

import json
import random
from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tk.proto.open_inference import open_inference_pb2 as oip
from tk.proto.v1 import generation_pb2 as pb
from tk.tests.infer.serve.hostile import ADMIN, GENERATION, OPEN_INFERENCE

MARK: Final = "zqmarkqz"
_WORDS: Final = (MARK, f"{MARK} \n\"'\\ {MARK}", MARK * 40)
_FIELDS: Final = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "n", "logprobs"),
    *("top_logprobs", "stream", "stream_options", "response_format", "user", "min_tokens", "stop_token_ids", "tools"),
    *("ignore_eos", "best_of", "echo", "suffix", "functions", "tool_choice", "metadata", MARK),
)
_HEADERS: Final = (
    *("x-request-id", "x-request-timeout", "authorization", "content-type", "content-encoding", "host", "origin"),
    *("sec-fetch-site", "transfer-encoding", "content-length", "expect", "connection", "cookie", "x-forwarded-for"),
    *("traceparent", "upgrade", "te", "accept", "referer", MARK),
)
_TARGETS: Final = (
    *(f"/{MARK}", f"/v1/{MARK}", f"/v1/models/{MARK}", f"/?{MARK}", f"/page/{MARK}", f"/v1/completions/{MARK}"),
    *(f"http://{MARK}/v1/completions", f"/%{MARK}", f"/health?{MARK}", f"/{MARK}\t", f"//{MARK}", f"*{MARK}"),
)
_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": MARK, "schema": {"type": MARK, MARK: [MARK]}}}


def http_calls(draw: random.Random, count: int) -> Iterator[bytes]:
    """Yields the bytes of requests, each of which is wrong somewhere, or right with the word in its prompt."""
    kinds = (_wrong_field, _wrong_header, _wrong_target, _wrong_body, _wrong_framing)
    for number in range(count):
        yield kinds[number % len(kinds)](draw)


def grpc_calls(draw: random.Random, count: int) -> Iterator[tuple[str, bytes, tuple[tuple[str, str], ...]]]:
    """Yields paths, messages and metadata of calls, as `http_calls` does."""
    for number in range(count):
        path, kind = draw.choice(_METHODS)
        data = _filled(kind.DESCRIPTOR, draw).SerializeToString()
        match number % 6:
            case 0:  # a field that the server does not know
                data += b"\xea\x04" + bytes((len(MARK),)) + MARK.encode()
            case 1:  # bytes that end too early, or are no UTF-8
                data = data[: draw.randrange(len(data) + 1)] + draw.choice((b"\x0a\xff", b"\xff", b"", b"\x0a\x02\xff"))
            case 2:
                path = draw.choice((f"/{MARK}/{MARK}", f"{GENERATION}{MARK}", f"{path}{MARK}"))
        given = (("authorization", f"Bearer {MARK}"), (f"x-{MARK}", MARK), ("traceparent", MARK), ("user-agent", MARK))
        yield path, data, draw.sample(given, draw.randrange(3)) if number % 3 else ()  # type: ignore[misc]


_METHODS: Final[tuple[tuple[str, type[Message]], ...]] = (
    *((f"{GENERATION}{name}", pb.GenerateRequest) for name in ("Generate", "GenerateOnce") for _ in range(4)),
    *((f"{GENERATION}Score", pb.ScoreRequest),) * 3,
    (f"{GENERATION}Tokenize", pb.TokenizeRequest),
    (f"{GENERATION}Detokenize", pb.TokenIds),
    *((f"{OPEN_INFERENCE}{name}", oip.ModelInferRequest) for name in ("ModelInfer", "ModelStreamInfer") * 3),
    (f"{OPEN_INFERENCE}ModelMetadata", oip.ModelMetadataRequest),
    (f"{OPEN_INFERENCE}ModelReady", oip.ModelReadyRequest),
    (f"{ADMIN}Abort", pb.AbortRequest),
    *((f"{ADMIN}Reload", pb.ReloadRequest),) * 2,
    ("/grpc.health.v1.Health/Check", pb.ReloadRequest),  # both have a text in field 1
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", pb.AbortRequest),
)


def _value(draw: random.Random) -> Any:
    word = draw.choice(_WORDS)
    return draw.choice((word, [word], [[word]], {word: word}, {word: 1}, [{word: [word]}], {"type": word}, [word] * 9))


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
    lines += [] if any(line.startswith("content-type") for line in headers) else ["content-type: application/json"]
    lines += [] if any(line.startswith("content-length") for line in headers) else [f"content-length: {len(body)}"]
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


def _right_body(draw: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"max_tokens": 2, "stop": MARK, "user": MARK}
    if draw.random() < 0.5:
        role = draw.choice(("user", MARK))
        return "/v1/chat/completions", body | {"messages": [{"role": role, "content": f"{MARK} hi"}]}
    return "/v1/completions", body | {"prompt": f"{MARK} hi", "stream": draw.random() < 0.5}


def _wrong_field(draw: random.Random) -> bytes:
    path, body = _right_body(draw)
    match draw.randrange(8):
        case 0:
            body["response_format"] = _SCHEMA
        case 1:
            body.setdefault("messages", [{}])[0][draw.choice(("name", "content", "role", MARK))] = _value(draw)
        case 2:
            body["model"] = MARK
        case 3:
            body["prompt"] = f"{MARK} " * 400
        case _:
            body[draw.choice(_FIELDS)] = _value(draw)
    return _post(path, json.dumps(body).encode())


def _wrong_header(draw: random.Random) -> bytes:
    path, body = _right_body(draw)
    value = draw.choice((MARK, f"Bearer {MARK}", f"{MARK}, {MARK}", f"http://{MARK}", f"{MARK}\x01", f"chunked {MARK}"))
    name = draw.choice(_HEADERS)
    value += " x" * (name == "x-request-id")  # a right one is in the log
    return _post(path, json.dumps(body).encode(), f"{name}: {value}")


def _wrong_target(draw: random.Random) -> bytes:
    target, method = draw.choice(_TARGETS), draw.choice(("GET", "POST", "PUT", "OPTIONS", MARK, MARK.upper()))
    return _post(target, b"{}").replace(b"POST", method.encode(), 1)


def _wrong_body(draw: random.Random) -> bytes:
    path, right = _right_body(draw)
    body = json.dumps(right).encode()
    cut = body[: draw.randrange(1, len(body))]
    twice = f'{{"{MARK}": 1, "{MARK}": 2}}'.encode()
    alone = json.dumps(draw.choice((MARK, [MARK]))).encode()
    deep = b'{"a":' * 70 + alone
    return _post(path, draw.choice((cut, twice, alone, deep, MARK.encode(), b'{"prompt": NaN}', b"\xff" + body)))


def _wrong_framing(draw: random.Random) -> bytes:
    data = _post(*_right_body(draw)[:1], MARK.encode() * 3)
    word = MARK.encode()
    match draw.randrange(6):
        case 0:
            return word + b"\r\n\r\n"
        case 1:
            return data.replace(b"HTTP/1.1", b"HTTP/" + word, 1)
        case 2:
            return data.replace(b"host:", word + b" :", 1)
        case 3:
            return data.replace(b"content-length: 24", b"transfer-encoding: chunked", 1)
        case 4:
            return data.replace(b"\r\n", b"\n" + word, 1)
        case _:
            return data.replace(b"content-length: 24", b"content-length: " + word, 1)


def _filled(kind: Descriptor, draw: random.Random, depth: int = 0) -> Message:
    """Returns a message with some of its fields set: texts have the word, numbers are odd ones."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if draw.random() < (0.4 if depth else 0.6):
            _fill(message, field, draw, depth)
    return message


def _fill(message: Message, field: FieldDescriptor, draw: random.Random, depth: int) -> None:
    value: Any
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            if depth > 3:
                return
            if field.message_type.GetOptions().map_entry:
                _fill_map(getattr(message, field.name), field.message_type, draw, depth)
                return
            value = _filled(field.message_type, draw, depth + 1)
        case FieldDescriptor.CPPTYPE_STRING:
            value = draw.choice(_WORDS) + "\0" * (draw.random() < 0.1)
            value += " " * (field.name in ("id", "request_id"))  # a right id is in the log
            value = value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            value = draw.choice((0.5, -1.0, float("nan")))
        case FieldDescriptor.CPPTYPE_BOOL:
            value = True
        case _:
            value = draw.choice((0, 1, 2, 70_000))
    if field.is_repeated:
        getattr(message, field.name).extend([value] * draw.choice((1, 1, 2, 40)))
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


def _fill_map(entries: Any, kind: Descriptor, draw: random.Random, depth: int) -> None:
    value = kind.fields_by_name["value"]
    if value.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        names = (MARK, "temperature", "stop", "max_tokens", "timeout", "json_schema", "logit_bias", "n", "seed")
        entries[draw.choice(names)].CopyFrom(_filled(value.message_type, draw, depth + 1))
    else:
        entries[draw.choice((3, 70_000))] = 0.5
