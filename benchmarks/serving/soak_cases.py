"""The requests of bench_reload_soak.py: each has the same answer whenever the same step of a model computes it."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tk.proto.v1 import generation_pb2 as pb

Message = pb.GenerateRequest | pb.ScoreRequest
_WORDS: Final = ("def", "import", "river", "seven", "return", "blue", "naïve", "你好", "for", "moon", "x = 1", "class")
_ROOM: Final = 12  # bits of the number that identifies a regular expression


@dataclass(frozen=True)
class SoakCase:
    """A request.

    Attributes:
        kind: "stream", "whole" or "score" over gRPC; "http" for both of OpenAI's completions.
        message: the message; of "http", its fields as JSON in `body`.
        body: the path and the body of a call over HTTP.
    """

    kind: str
    message: Message | None = None
    body: tuple[str, dict[str, Any]] | None = None

    def fresh(self, number: int) -> "SoakCase":
        """Returns a request with the same answer, whose constraint, if any, is one that no request had before."""
        if isinstance(self.message, pb.GenerateRequest) and self.message.sampling.WhichOneof("constraint"):
            message = pb.GenerateRequest.FromString(self.message.SerializeToString())
            _set_apart(message.sampling, number)
            return SoakCase(self.kind, message)
        if self.body is not None and "response_format" in self.body[1]:
            path, body = self.body
            return SoakCase(self.kind, body=(path, {**body, "response_format": _form(number)}))
        return self


def make_cases(count: int, vocab_size: int) -> list[SoakCase]:
    """Returns requests of all kinds, the same ones each time."""
    makers = (_stream, _whole, _constrained, _chat, _score, _over_http)
    return [makers[number % len(makers)](random.Random(f"case {number}"), vocab_size) for number in range(count)]


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(1, 40)))


def _request(draw: random.Random) -> pb.GenerateRequest:
    sampling = pb.Sampling(
        seed=draw.getrandbits(32), temperature=draw.choice((0.0, 0.7, 1.0)), n=draw.choice((1, 1, 3))
    )
    stopping = pb.Stopping(max_new_tokens=draw.randint(1, 40))
    return pb.GenerateRequest(sampling=sampling, stopping=stopping)


def _stream(draw: random.Random, vocab_size: int) -> SoakCase:
    request = _request(draw)
    request.tokens.ids.extend(draw.choices(range(10, vocab_size), k=draw.randint(1, 200)))
    return SoakCase("stream", request)


def _whole(draw: random.Random, vocab_size: int) -> SoakCase:
    request = _request(draw)
    request.text = _text(draw)
    request.stopping.stop.append(draw.choice(_WORDS))
    request.output.logprobs = draw.randint(0, 5)
    if draw.random() < 0.3:
        request.output.prompt_logprobs = 2
    return SoakCase("whole", request)


def _constrained(draw: random.Random, vocab_size: int) -> SoakCase:
    request = _request(draw)
    request.text = _text(draw)
    constraint = draw.choice(("json_schema", "regex", "grammar"))
    texts = {
        "json_schema": json.dumps(_schema(0)),
        "regex": draw.choice(("[a-z]{1,12}( [a-z]{1,12})*", "[0-9]{3}-[0-9]{4}", "(yes|no|perhaps){1,9}")),
        "grammar": 'start: item ("," item)*\nitem: /[a-z]+/ | /[0-9]+/\n',
    }
    setattr(request.sampling, constraint, texts[constraint])
    return SoakCase(draw.choice(("stream", "whole")), request)


def _chat(draw: random.Random, vocab_size: int) -> SoakCase:
    request = _request(draw)
    for role in ("user", "assistant", "user")[: draw.choice((1, 3))]:
        request.chat.messages.add(role=role, content=_text(draw))
    return SoakCase(draw.choice(("stream", "whole")), request)


def _score(draw: random.Random, vocab_size: int) -> SoakCase:
    return SoakCase(
        "score", pb.ScoreRequest(text=_text(draw), continuation_text=" " + _text(draw), top=draw.randint(0, 3))
    )


def _over_http(draw: random.Random, vocab_size: int) -> SoakCase:
    body: dict[str, Any] = {"seed": draw.getrandbits(32), "max_tokens": draw.randint(1, 40), "n": draw.choice((1, 2))}
    body |= {"temperature": draw.choice((0.0, 0.8)), "stream": draw.random() < 0.5}
    if draw.random() < 0.4:
        body["response_format"] = _form(0)
    if draw.random() < 0.5:
        return SoakCase("http", body=("/v1/completions", {**body, "prompt": _text(draw)}))
    messages = [{"role": "user", "content": _text(draw)}]
    return SoakCase("http", body=("/v1/chat/completions", {**body, "messages": messages}))


def _schema(number: int) -> dict[str, Any]:
    """Returns a schema whose description is the number, which no text depends on."""
    person = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}}}
    return {"type": "array", "items": person, "minItems": 1, "maxItems": 3, "description": f"number {number}"}


def _form(number: int) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": str(number), "schema": _schema(number)}}


def _set_apart(sampling: pb.Sampling, number: int) -> None:
    """Gives a constraint another text with the same meaning."""
    make: dict[str, Callable[[str], str]] = {
        "json_schema": lambda text: json.dumps(_schema(number)),
        "regex": lambda text: text + "".join("(?:)" if number >> bit & 1 else "(?:){1}" for bit in range(_ROOM)),
        "grammar": lambda text: f"{text}// number {number}\n",
    }
    kind = sampling.WhichOneof("constraint")
    setattr(sampling, kind, make[kind](getattr(sampling, kind)))
