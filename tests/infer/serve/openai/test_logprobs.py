"""Log-probabilities over HTTP of every family of tokenizers, by properties: offsets, names, counts, streamed = whole.

The engine's events are made as the real one makes them, of tokens that a script draws.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tk.infer.engine.request.events import Done, Event, TokenLogprob, TopLogprob
from tk.infer.engine.request.request import Request
from tk.infer.engine.schedule.samples.deltas import DeltaBuilder, Ending
from tk.tests.infer.serve.fake_engine import ByteTokenizer, FakeEngine, finished, started
from tk.tests.infer.serve.http.http_server import HttpServerThread
from tk.tests.text.families import FAMILIES, tokenizer_of
from tk.text.detokenizer import PromptEnd
from tk.text.tokenizer import Tokenizer
from tk.text.tokenizer_files import TextFiles

END: Final = 2  # the special token that ends a text, in all families
TEXTS: Final = ("☃😀é the", "日本語, 12", "e\u0301a  abc", "\N{WOMAN}\u200d\N{GIRL}\U0001f3fd ab", "naïve\n\tthe")
STOPS: Final[tuple[list[str], ...]] = ([], ["é", "bc", " the"], ["\ufffd"], ["日本語,", "\u200d"])
PATHS: Final = {"text": "/v1/completions", "chat": "/v1/chat/completions"}
# (dialect, samples, alternatives, stop strings)
SOME: Final = [("text", 1, 0, STOPS[0]), ("text", 3, 5, STOPS[1]), ("chat", 1, 20, STOPS[2]), ("text", 2, 20, STOPS[3])]
ALL: Final = [(path, n, top, stop) for path in PATHS for n in (1, 3) for top in (0, 1, 2, 5, 20) for stop in STOPS]


class DrawnTokens:
    """The script of an engine that answers with drawn tokens: characters, parts of some, special and unknown tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, request: Request) -> Sequence[Event]:
        samples = [list(self._sample(request, index)) for index in range(request.params.n)]
        longest = max(map(len, samples))
        mixed = [events[place] for place in range(longest) for events in samples if place < len(events)]
        return [started(request), *mixed, Done()]

    def _sample(self, request: Request, index: int) -> Iterator[Event]:
        tokenizer, params, chance = self._tokenizer, request.params, random.Random(f"{request.params.seed} {index}")
        prompt = tokenizer.encode(chance.choice(TEXTS))[: chance.randint(1, 9)]
        output = DeltaBuilder(index, params, tokenizer, (), 24, end=PromptEnd.of(tokenizer, prompt, False))
        ending: Ending | None = None
        while ending is None:
            for token in self._some(chance):
                others = dict.fromkeys((token, *chance.sample(range(tokenizer.vocab_size + 40), 20)))
                first = output.is_first
                tops = [TopLogprob(each, -0.5, tokenizer.token_bytes(each, first)) for each in others]
                bytes_of = tokenizer.token_bytes(token, first)
                delta, ending = output.push(
                    token, TokenLogprob(token, -0.25, 1, bytes_of, tuple(tops[: params.logprobs]))
                )
                if delta.text or delta.token_ids:
                    yield delta
                if ending is not None:
                    yield finished(index, ending.reason, output.num_tokens)
                    break

    def _some(self, chance: random.Random) -> list[int]:
        kind = chance.random()
        text = self._tokenizer.encode(chance.choice(TEXTS), special_tokens=False)
        if kind < 0.5:
            return text
        return chance.choices(text, k=3) if kind < 0.8 else [chance.choice([END, self._tokenizer.vocab_size + 1])]


class TemplateTokenizer(ByteTokenizer):
    files = TextFiles(Path("a folder"), {"chat_template.jinja": b"{{ messages[0].content }}"})


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    engine.tokenizer = TemplateTokenizer()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def shared(engine: FakeEngine) -> Iterator[HttpServerThread]:
    server = HttpServerThread(engine, http_port=0)
    yield server
    server.close()


def joined(server: HttpServerThread, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream, put together: text, reason, and every list among the log-probabilities."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "logprobs": {}, "finish_reason": None})
    for event in server.ask(path, {**body, "stream": True}).events[:-1]:
        for piece in event["choices"]:
            choice = choices[piece["index"]]
            choice["text"] += piece["text"] if "text" in piece else piece["delta"].get("content", "")
            choice["finish_reason"] = choice["finish_reason"] or piece["finish_reason"]
            for name, values in (piece["logprobs"] or {}).items():
                choice["logprobs"][name] = (choice["logprobs"].get(name) or []) + values if values else values
            places = choice["logprobs"].get("text_offset", [])
            assert all(place <= len(choice["text"]) for place in places), "a place in what the caller has"
    return [choices[index] for index in sorted(choices)]


def whole(server: HttpServerThread, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in server.ask(path, body).json["choices"]
    ]


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *((family, case) for number, family in enumerate(FAMILIES) for case in SOME[number % 2 :: 2]),
        *(pytest.param(family, None, marks=pytest.mark.matrix) for family in FAMILIES),
    ],
)
def test_places_names_and_numbers_of_log_probabilities(
    shared: HttpServerThread,
    engine: FakeEngine,
    family: str,
    case: tuple[str, int, int, list[str]] | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tokenizer, _ = tokenizer_of(family, tmp_path_factory.getbasetemp())
    engine.script = DrawnTokens(tokenizer)
    for seed, (dialect, samples, top, stop) in enumerate([case] * 3 if case else ALL * 5):
        body: dict[str, Any] = {"model": "fake", "seed": seed, "n": samples, "stop": stop}
        if dialect == "chat":
            body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": top}
        else:
            body |= {"prompt": "x", "logprobs": top}
        choices = whole(shared, PATHS[dialect], body)
        assert choices == joined(shared, PATHS[dialect], body)
        assert len(choices) == samples
        for choice in choices:
            check = check_text if dialect == "text" else check_chat
            check(choice["text"], choice["logprobs"], top, tokenizer)


def check_text(text: str, logprobs: dict[str, Any], top: int, tokenizer: Tokenizer) -> None:
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert 0 < len(tokens) == len(offsets) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    hidden = set(tokenizer.special_tokens)
    for token, offset, others in zip(tokens, offsets, logprobs["top_logprobs"], strict=True):
        assert len(others) == top, "as many names as were asked for"
        assert top == 0 or token in others, "the drawn token is the first alternative"
        rest = text[offset:]
        is_whole = not token.startswith(("bytes:", "token_id:"))
        if is_whole and token not in hidden:
            assert rest.startswith(token) or token.startswith(rest) or set(rest[: len(token)]) == {"\ufffd"}
        elif not is_whole:
            assert "\ufffd" not in token


def check_chat(text: str, logprobs: dict[str, Any], top: int, tokenizer: Tokenizer) -> None:
    entries = logprobs["content"]
    for each in [*entries, *(other for entry in entries for other in entry["top_logprobs"])]:
        raw = bytes(each["bytes"])
        named = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        assert each["token"].encode() == raw or each["token"] == named
    assert all(len(entry["top_logprobs"]) == top for entry in entries)
    if "\ufffd" not in text and tokenizer.is_byte_level:
        hidden = {token.encode() for token in tokenizer.special_tokens}
        spelled = b"".join(raw for entry in entries if (raw := bytes(entry["bytes"])) not in hidden)
        # The prompt may have begun the first character, whole or as its own U+FFFD.
        cuts = [(count, skip) for count in range(4) for skip in range(4)]
        assert any(spelled[skip:].startswith(text.encode()[count:]) for count, skip in cuts), (text, spelled)
