"""The text of what follows a prompt: of every family of tokenizers, after every kind of prompt, in any pieces."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tokenizers

from tk.tests.text.families import FAMILIES, all_texts, tokenizer_of
from tk.text.detokenizer import DetokenizerStream, PromptEnd
from tk.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return tokenizer_of(request.param, tmp_path_factory.getbasetemp())


def prompts(theirs: tokenizers.Tokenizer, chance: random.Random) -> Iterator[list[int]]:
    """Prompts that end in all ways: with a word, a part of one, a space, a line, a special token, half a character."""
    yield from ([], [1], [1, 1], [2, 0])
    for text in all_texts():
        whole = theirs.encode(text).ids
        yield whole
        yield whole[: chance.randrange(len(whole) + 1)]
        yield [*whole, 2]
    for text in ("the ", " ", "  ", "the\n", "☃", "the ☃"):
        yield theirs.encode(text, add_special_tokens=False).ids
    snowman = theirs.encode("the ☃", add_special_tokens=False).ids
    yield from (snowman[:-1], snowman[:-2], snowman[-1:], snowman[-2:], [*snowman, *snowman[-3:-2]])
    yield [chance.randrange(theirs.get_vocab_size()) for _ in range(6)]


def added(theirs: tokenizers.Tokenizer, prompt: Sequence[int], new: Sequence[int], keep: bool) -> str:
    """What new tokens add to a prompt's text, by whole decodings."""
    before = theirs.decode(prompt, skip_special_tokens=not keep)
    both = theirs.decode([*prompt, *new], skip_special_tokens=not keep)
    shared = next(count for count in range(len(before), -1, -1) if both.startswith(before[:count]))
    return both[shared:]


def streamed(ours: Tokenizer, prompt: Sequence[int], new: Sequence[int], keep: bool, cuts: Sequence[int]) -> str:
    stream = DetokenizerStream(ours, keep, PromptEnd.of(ours, prompt, keep))
    ends = sorted({0, len(new), *cuts})
    pieces = [stream.push(new[start:stop]) for start, stop in itertools.pairwise(ends)]
    whole = "".join([*pieces, stream.flush()])
    assert stream.offset_of(new[-1] if new else 0) == len(whole)
    return whole


def test_pieces_are_what_the_new_tokens_add_to_the_text_of_the_prompt(
    pair: tuple[Tokenizer, tokenizers.Tokenizer],
) -> None:
    ours, theirs = pair
    chance = random.Random(7)
    for prompt in prompts(theirs, chance):
        for _ in range(6):
            new = [chance.randrange(theirs.get_vocab_size()) for _ in range(chance.randint(1, 6))]
            if chance.random() < 0.5:
                new = theirs.encode(chance.choice(list(all_texts())), add_special_tokens=False).ids
            keep = chance.random() < 0.3
            expected = added(theirs, prompt, new, keep)
            for cuts in (range(len(new)), [chance.randint(0, len(new))]):
                found = streamed(ours, prompt, new, keep, cuts)
                assert found == expected or is_broken(theirs, prompt, new, keep), (prompt, new, keep)


def test_a_token_begins_in_the_text_where_the_text_before_it_ends(
    pair: tuple[Tokenizer, tokenizers.Tokenizer],
) -> None:
    ours, theirs = pair
    chance = random.Random(11)
    [letter] = theirs.encode("a", add_special_tokens=False).ids[-1:]
    halves = theirs.encode("☃😀", add_special_tokens=False).ids[-7:]
    for prompt in prompts(theirs, chance):
        for _ in range(6):
            new = [chance.choice([*halves, chance.randrange(theirs.get_vocab_size())]) for _ in range(5)]
            stream = DetokenizerStream(ours, False, PromptEnd.of(ours, prompt, False))
            for place, token in enumerate(new):
                before = new[:place]
                text = streamed(ours, prompt, [*before, letter], False, ())
                assert text[stream.offset_of(letter) :].strip() == "a", (prompt, new, place)
                assert stream.offset_of(token) <= len(streamed(ours, prompt, [*before, token], False, ()))
                stream.push([token])


def is_broken(theirs: tokenizers.Tokenizer, prompt: Sequence[int], new: Sequence[int], keep: bool) -> bool:
    """Whether new byte tokens make the complete characters of the prompt unreadable in the library's text."""
    before = theirs.decode(prompt, skip_special_tokens=not keep)
    both = theirs.decode([*prompt, *new], skip_special_tokens=not keep)
    return not both.startswith(before.rstrip("\ufffd"))


def test_a_token_that_came_before_is_decoded_with_its_text_alone_known(
    pair: tuple[Tokenizer, tokenizers.Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    ids = theirs.encode("the other the other", add_special_tokens=False).ids

    def facts() -> list[tuple[str, bytes, bytes]]:
        return [(ours.text_alone(i), ours.token_bytes(i), ours.token_bytes(i, is_first=True)) for i in ids]

    first = facts()
    assert first == facts()
    assert [text for text, *_ in first] == [theirs.decode([i], skip_special_tokens=False) for i in ids]
    decoded = list[Sequence[int]]()

    def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
        decoded.append(ids)
        return theirs.decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(ours, "decode", decode)
    assert first == facts()
    assert not decoded
    assert streamed(ours, [], ids, False, range(len(ids))) == theirs.decode(ids)
    assert len(decoded) <= len(ids) + 1, "one decoding for each token, and that of no tokens"


def test_a_space_before_a_word_is_the_texts_only_after_other_text(tmp_path: Path) -> None:
    ours, theirs = tokenizer_of("llama2", tmp_path)
    [space], [the] = ([token for piece, token in theirs.get_vocab().items() if piece == each] for each in ("▁", "▁the"))
    for prompt, text in (([], "the"), ([1], "the"), ([1, the], " the"), ([1, space], " the")):
        assert streamed(ours, prompt, [the], False, ()) == text
    assert streamed(ours, [1], [the], True, ()) == " the", "after a special token that is shown"


@pytest.mark.parametrize("family", ["gpt2", "llama2"])
def test_the_rest_of_a_character_that_the_prompt_began_is_the_whole_character(family: str, tmp_path: Path) -> None:
    ours, theirs = tokenizer_of(family, tmp_path)
    snowman = theirs.encode("a☃", add_special_tokens=False).ids
    for cut in (1, 2):
        assert streamed(ours, snowman[:-cut], snowman[-cut:], False, ()) == "☃"
    assert streamed(ours, snowman, snowman[-3:-2], False, ()) == "\ufffd", "the whole one stays as it is"


def test_the_end_of_a_prompt_is_found_in_a_few_tokens(tmp_path: Path) -> None:
    class Counted(list[int]):
        seen = 0

        def __reversed__(self) -> Iterator[int]:
            for token in super().__reversed__():
                self.seen += 1
                yield token

    for family in FAMILIES:
        ours, theirs = tokenizer_of(family, tmp_path)
        prompt = Counted(theirs.encode("the theory " * 500, add_special_tokens=False).ids)
        PromptEnd.of(ours, prompt, False)
        assert 0 < prompt.seen <= 4
