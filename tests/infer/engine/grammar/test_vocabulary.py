"""Constrained texts of every family of tokenizers, after every kind of prompt: those that users get match.

A walk takes random tokens that the mask allows. Its text is what `tokenizers` makes of prompt and tokens together.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tk.core.errors import InvalidRequest
from tk.infer.engine.grammar.compiler import Grammars
from tk.infer.engine.grammar.grammar import Constraint, Matcher
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.samples.deltas import DeltaBuilder
from tk.tests.infer.random_schemas import is_accepted
from tk.tests.text.families import FAMILIES, tokenizer_of
from tk.text.detokenizer import PromptEnd
from tk.text.tokenizer import Tokenizer

END, MOST, ROOM = 2, 80, 5
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["the", "a b"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEXES = {
    "word": r"(the|ab){1,3}",
    "space": r" (the|ab| ){1,3}",
    "either": r"[abc ]{1,6}",
    "choice": r"yes|no|maybe| yes",
    "bytes": r"(é|☃|é☃ ){1,3}",
    "lines": r"\n?[ \t]*a\n",
    "any": r"[^0-9]{2,5}",
    "nothing": r" ?",
}
PROMPTS: dict[str, Callable[[tokenizers.Tokenizer], list[int]]] = {
    "empty": lambda theirs: [],
    "special": lambda theirs: [1],
    "word": lambda theirs: theirs.encode("the").ids,
    "space": lambda theirs: theirs.encode("the ", add_special_tokens=False).ids,
    "one space": lambda theirs: theirs.encode(" ", add_special_tokens=False).ids,
    "line": lambda theirs: theirs.encode("the\n").ids,
    "special at the end": lambda theirs: [*theirs.encode("the").ids, 1],
    "snowman": lambda theirs: theirs.encode("☃", add_special_tokens=False).ids,
    "half a snowman": lambda theirs: theirs.encode("a☃", add_special_tokens=False).ids[:-1],
}
SPELLED = ("gpt2", "llama3", "qwen", "added", "llama2", "mistral", "gemma", "metaspace never", "metaspace always")
CHOSEN = {"llama2": REGEXES, "metaspace always": REGEXES}  # of the others, one expression for each in `make test`


def allowed(matcher: Matcher) -> list[int]:
    mask = np.zeros(matcher.num_words, np.uint32)
    matcher.write_mask(mask)
    if matcher.error is not None:
        raise matcher.error
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def added(theirs: tokenizers.Tokenizer, prompt: Sequence[int], new: Sequence[int], keep: bool) -> str | None:
    """What new tokens add to a prompt's text, by whole decodings; None where a character is not complete."""
    before, both = (theirs.decode(ids, skip_special_tokens=not keep) for ids in (prompt, [*prompt, *new]))
    after = both[len(before) :]
    return after if both.startswith(before) and "\ufffd" not in after else None


def walk(
    grammars: Grammars,
    pair: tuple[Tokenizer, tokenizers.Tokenizer],
    constraint: Constraint,
    prompt: Sequence[int],
    chance: random.Random,
) -> Iterator[tuple[str, bool]]:
    """Takes random tokens; yields the text after each, if it is one, and whether the end is allowed there."""
    ours, theirs = pair
    keep = chance.random() < 0.3
    matcher = grammars.compile(constraint, "", prompt, keep).start(keep)
    params = SamplingParams(keep_special_tokens=keep)
    output = DeltaBuilder(0, params, ours, {END}, MOST, matcher, PromptEnd.of(ours, prompt, keep))
    ids, text = list[int](), ""
    while True:
        tokens = allowed(matcher)
        assert tokens, "a text can always go on or end"
        if (whole := added(theirs, prompt, ids, keep)) is not None:
            yield whole, END in tokens
        ids.append(chance.choice(tokens))
        delta, ending = output.push(ids[-1], None)
        text += delta.text
        if ending is not None:
            if len(ids) < MOST:
                assert text == added(theirs, prompt, ids, keep), "users get the same text"
                whole = added(theirs, prompt, [token for token in ids if token != END], keep)
                assert whole is not None
                yield whole, True
            return


def combinations() -> Iterator[Any]:
    for number, family in enumerate(FAMILIES):
        for place, name in enumerate((*REGEXES, "schema")):
            is_chosen = name in CHOSEN.get(family, ()) or place == number % len(REGEXES)
            yield pytest.param(family, name, marks=() if is_chosen else pytest.mark.matrix)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Grammars, Any]]:
    made: dict[str, tuple[Grammars, Any]] = {}

    def family(name: str) -> tuple[Grammars, Any]:
        if name not in made:
            pair = tokenizer_of(name, tmp_path_factory.getbasetemp())
            made[name] = Grammars(pair[0], pair[0].vocab_size + ROOM, (END,)), pair
        return made[name]

    return family


@pytest.mark.parametrize(("family", "name"), list(combinations()))
def test_the_text_that_users_get_matches(
    families: Callable[[str], tuple[Grammars, Any]], family: str, name: str
) -> None:
    grammars, pair = families(family)
    constraint = (
        Constraint("regex", REGEXES[name]) if name in REGEXES else Constraint("json_schema", json.dumps(SCHEMA))
    )
    for prompt_name, prompt_of in PROMPTS.items():
        prompt = prompt_of(pair[1])
        chance = random.Random(prompt_name)
        for _ in range(4):
            try:
                seen = list(walk(grammars, pair, constraint, prompt, chance))
            except InvalidRequest:
                assert family not in SPELLED or prompt_name == "half a snowman", "all bytes have a token"
                break
            for text, may_end in seen:
                if name in REGEXES:
                    assert may_end == bool(re.fullmatch(REGEXES[name], text)), (prompt_name, text)
                elif may_end:
                    assert is_accepted(text, SCHEMA), (prompt_name, text)


@pytest.mark.parametrize("family", ["llama2", "metaspace always"])
def test_a_named_special_token_leaves_the_text_at_its_start(
    families: Callable[[str], tuple[Grammars, Any]], family: str
) -> None:
    grammars, (_, theirs) = families(family)
    the = theirs.token_to_id("▁the")
    for keep, shown in ((False, "the"), (True, " the")):
        grammar = grammars.compile(Constraint("grammar", f'start: <s> "{shown}"'), "", (), keep)
        matcher = grammar.start(keep)
        assert allowed(matcher) == [1]
        matcher.take(1)
        assert the in allowed(matcher)
        matcher.take(the)
        assert matcher.is_complete
        assert theirs.decode([1, the], skip_special_tokens=not keep).removeprefix("<s>") == shown


def test_tokens_that_spell_bytes_have_one_vocabulary_at_all_places(
    families: Callable[[str], tuple[Grammars, Any]],
) -> None:
    grammars, (_, theirs) = families("gpt2")
    prompts: tuple[list[int], ...] = ([], [1], theirs.encode("the ").ids, theirs.encode("a☃").ids[:-1])
    grammar, *others = (grammars.compile(Constraint("regex", "(the){9}"), "", prompt) for prompt in prompts)
    assert all(other is grammar for other in others)


def test_a_text_may_begin_with_what_never_stands_inside_one(families: Callable[[str], tuple[Grammars, Any]]) -> None:
    grammars, (_, theirs) = families("words")  # every word but the first has a space before it
    [yes, no] = theirs.encode("yes no").ids
    assert allowed(grammars.compile(Constraint("regex", "yes|no")).start()) == sorted([yes, no])
    with pytest.raises(InvalidRequest, match="no text matches it"):
        grammars.compile(Constraint("regex", "yes|no"), "", [yes])


@pytest.mark.parametrize("ends", [(), (10**6,), (END, 10**6)])
def test_ends_that_the_vocabulary_lacks_do_not_matter(ends: tuple[int, ...], tmp_path: Path) -> None:
    ours, _ = tokenizer_of("llama2", tmp_path)
    grammar = Grammars(ours, ours.vocab_size, ends).compile(Constraint("regex", "(ab)+"), "", [1])
    assert re.fullmatch("a|ab|▁a|▁ab|abab", ours.decode([allowed(grammar.start())[-1]]))


def test_a_decoder_that_gives_a_token_another_text_beside_others_is_refused(tmp_path: Path) -> None:
    _, theirs = tokenizer_of("gpt2", tmp_path)
    theirs.decoder = tokenizers.decoders.BPEDecoder("e")
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(InvalidRequest, match="gives a token another text beside other tokens"):
        Grammars(tokenizer, tokenizer.vocab_size, (END,)).compile(Constraint("regex", "a"))
