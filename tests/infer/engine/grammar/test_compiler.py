"""Grammars over small vocabularies: random walks through their masks, with `re` and a JSON validator as the oracles."""

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tk.core.errors import InvalidRequest
from tk.infer.engine.grammar import compiler
from tk.infer.engine.grammar.compiler import Grammars, MissingExtra
from tk.infer.engine.grammar.grammar import Constraint, Kind, Matcher
from tk.tests.infer.conftest import EOS, VOCAB
from tk.tests.infer.random_schemas import is_accepted, random_schema
from tk.text.tokenizer import Tokenizer

ROOM = 9  # ids of the model's vocabulary beyond the tokenizer's


@pytest.fixture(scope="module")
def byte_level(model_folder: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(model_folder("grouped"))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As SentencePiece makes them: words with a mark for the space, and bytes for other characters; the end is 1."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(0x21, 0x7F))]
    vocab = {piece: token_id for token_id, piece in enumerate([*pieces, "ab", "▁ab", "12"])}
    backend = Backend(models.BPE(vocab, [("a", "b"), ("▁", "ab"), ("1", "2")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "</s>"])
    folder = tmp_path_factory.mktemp("metaspace")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return Tokenizer.from_folder(folder)


@pytest.fixture(params=["byte_level", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def grammars(byte_level: Tokenizer) -> Grammars:
    return Grammars(byte_level, VOCAB, (EOS,))


def allowed(matcher: Matcher) -> list[int]:
    """Returns the token ids that a mask allows."""
    mask = np.zeros(matcher.num_words, np.uint32)
    matcher.write_mask(mask)
    assert matcher.error is None
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(tokenizer: Tokenizer, kind: Kind, text: str, seed: int) -> Iterator[tuple[str, bool]]:
    """Takes random allowed tokens; yields the text after each, and whether the end is allowed there."""
    (end,) = tokenizer.eos_token_ids
    matcher = Grammars(tokenizer, tokenizer.vocab_size + ROOM, (end,)).compile(Constraint(kind, text)).start()
    chance, ids = random.Random(seed), list[int]()
    while True:
        tokens = allowed(matcher)
        assert tokens, "a text can always go on or end"
        found = [token for token in range(tokenizer.vocab_size + ROOM) if matcher.first_allowed([token]) == token]
        assert found == tokens, "one by one as by the mask"
        assert max(tokens) < tokenizer.vocab_size
        yield b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace"), end in tokens
        ids.append(chance.choice(tokens))
        if ids[-1] == end:
            return
        matcher.take(ids[-1])
        if matcher.is_complete:
            yield b"".join(map(tokenizer.token_bytes, ids)).decode(), True
            return


@pytest.mark.parametrize("regex", [r"[a-c]{0,4}", r"(ab)*", r"x", r"[ab12 ]{3,9}\.", r"(été|ß)+", ""])
def test_the_end_is_allowed_exactly_where_the_regex_matches(tokenizer: Tokenizer, regex: str) -> None:
    for seed in range(8):
        seen = list(walk(tokenizer, "regex", regex, seed))
        for text, may_end in seen:
            assert may_end == bool(re.fullmatch(regex, text)), text
        assert seen[-1][1]


def test_a_grammar_in_larks_syntax(tokenizer: Tokenizer) -> None:
    sums = 'start: "(" side "+" side ")"\nside: /[1-9]/ | start'
    lengths = set()
    for seed in range(30):
        text, may_end = list(walk(tokenizer, "grammar", sums, seed))[-1]
        assert may_end
        assert re.fullmatch(r"[(+)0-9]+", text)
        assert eval(text) > 0  # the language is a part of Python's
        lengths.add(len(text))
    assert len(lengths) > 2


def test_documents_of_random_schemas_are_accepted(tokenizer: Tokenizer) -> None:
    for seed in range(40):
        schema = random_schema(seed)
        text, may_end = list(walk(tokenizer, "json_schema", json.dumps(schema), seed))[-1]
        assert may_end
        assert is_accepted(text, schema), (text, schema)


def test_json_has_no_free_whitespace_whatever_the_schema_asks_for(byte_level: Tokenizer) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3}
    schema["x-guidance"] = {"whitespace_flexible": True, "item_separator": ","}
    for seed in range(10):
        text, _ = list(walk(byte_level, "json_schema", json.dumps(schema), seed))[-1]
        assert re.fullmatch(r"\[[12],[12],[12]\]", text)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "", "is not valid JSON"),
        ("json_schema", "[1]", "a schema is a JSON object, not list"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "http://127.0.0.1/schema"}', "not fetch"),
        ("json_schema", '{"a":' * 5000 + "1" + "}" * 5000, "is not valid JSON"),
        ("regex", "a(b", "unclosed group"),
        ("regex", r"[^\s\S]", "no text matches it"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a\ud800", "not valid Unicode"),
        ("grammar", "start: foo", "unknown name"),
        ("grammar", "begin: /a/", "start"),
        ("grammar", "a" * (compiler.MAX_BYTES + 1), "more than 262144 bytes"),
    ],
)
def test_a_constraint_that_cannot_be_used_is_refused(grammars: Grammars, kind: Kind, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        grammars.compile(Constraint(kind, text))
    assert error.value.field == kind
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("limit", "value", "constraint"),
    [
        ("_BUILD_FUEL", 10, Constraint("regex", "(abc|def){3,9}[a-z]{40}")),
        ("_GRAMMAR_SIZE", 5, Constraint("grammar", 'start: "(" start ")" | "[" start "]" | "a"')),
    ],
)
def test_a_grammar_beyond_a_limit_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, constraint: Constraint
) -> None:
    grammars.compile(Constraint(constraint.kind, constraint.text + " "))
    monkeypatch.setattr(compiler, limit, value)
    with pytest.raises(InvalidRequest, match=f"too big .limit for this grammar: {value}"):
        grammars.compile(constraint)


def test_a_grammar_that_becomes_too_complex_has_an_error(
    byte_level: Tokenizer, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MASK_FUEL", 400)
    matcher = grammars.compile(Constraint("regex", "x{3}((a|b)*a(a|b){12}|[^x]*(ab|cd)+z)")).start()
    for token in byte_level.encode("xxx"):
        assert token in allowed(matcher)
        matcher.take(token)
    matcher.write_mask(np.zeros(matcher.num_words, np.uint32))
    error = matcher.error
    assert isinstance(error, InvalidRequest)
    assert error.field == "regex"
    assert "too complex" in str(error)
    assert not matcher.is_complete


def test_a_text_that_no_token_continues_has_an_error_that_says_so(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    matcher = Grammars(Tokenizer.from_folder(tmp_path), 3, (2,)).compile(Constraint("regex", "a(y|z)")).start()
    assert allowed(matcher) == [0]
    matcher.take(0)
    matcher.write_mask(np.zeros(matcher.num_words, np.uint32))
    assert "no token of the model's vocabulary does" in str(matcher.error)


def test_a_token_that_is_not_allowed_is_an_error(grammars: Grammars) -> None:
    matcher = grammars.compile(Constraint("regex", "b")).start()
    matcher.take(ord("a") - 33)
    assert matcher.error is not None


def test_samples_have_states_of_their_own(grammars: Grammars) -> None:
    grammar = grammars.compile(Constraint("regex", "ab|ba"))
    first, second = grammar.start(), grammar.start()
    before = allowed(second)
    first.take(before[0])
    assert allowed(second) == before != allowed(first)


def test_grammars_are_kept_for_equal_constraints(grammars: Grammars) -> None:
    made = grammars.compile(Constraint("regex", "a"))
    assert grammars.compile(Constraint("regex", "a")) is made
    assert grammars.compile(Constraint("grammar", 'start: "a"')) is not made
    others = grammars.compile(Constraint("regex", "a"), "bob")
    assert others is not made, "how long it takes would show what another principal uses"
    assert grammars.compile(Constraint("regex", "a"), "bob") is others


@pytest.mark.parametrize(("samples", "length"), [(40, 1000), pytest.param(4, 10_000, marks=pytest.mark.matrix)])
def test_a_sample_fails_for_nothing_that_others_have_used(grammars: Grammars, samples: int, length: int) -> None:
    """A text of these letters makes a state or two per token, of which a grammar may have 50,000, and much work."""
    constraint, draw = Constraint("regex", "(a|b)*a(a|b){40}c"), random.Random(0)
    letters = [grammars._tokenizer.encode(letter)[0] for letter in "ab"]  # type: ignore[union-attr]
    for _ in range(samples):
        matcher = grammars.compile(constraint).start()
        for _ in range(length):
            token = draw.choice(letters)
            matcher.look_ahead()
            assert matcher.first_allowed([token]) == token
            matcher.take(token)
        assert matcher.error is None


def test_a_panic_of_the_library_is_a_constraint_that_cannot_be_used(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyo3's class of a Rust panic is no Exception: the handlers of calls would let it pass, and nobody answered."""
    panic = type("PanicException", (BaseException,), {})

    def fail(*_: object) -> str:
        raise panic("index out of bounds")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_library_text", fail)
        with pytest.raises(InvalidRequest, match="index out of bounds") as refusal:
            grammars.compile(Constraint("regex", "a"))
    assert refusal.value.field == "regex"
    assert grammars.compile(Constraint("regex", "a")).start(), "the next one is built"


def test_without_the_extra_it_says_what_to_install(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"pip install 'llguidance>=") as error:
        grammars.compile(Constraint("regex", "a"))
    assert (error.value.grpc_status, error.value.field) == ("UNIMPLEMENTED", "regex")


def test_without_a_tokenizer_there_is_no_text_to_constrain() -> None:
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        Grammars(None, VOCAB, (EOS,)).compile(Constraint("regex", "a"))
