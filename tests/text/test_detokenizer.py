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
    return streamed_with_offsets(ours, prompt, new, keep, cuts)[0]


def streamed_with_offsets(
    ours: Tokenizer, prompt: Sequence[int], new: Sequence[int], keep: bool, cuts: Sequence[int]
) -> tuple[str, list[int]]:
    stream, text, offsets = DetokenizerStream(ours, keep, PromptEnd.of(ours, prompt, keep)), "", list[int]()
    for start, stop in itertools.pairwise(sorted({0, len(new), *cuts})):
        text += stream.push(new[start:stop])
        offsets += stream.take_offsets()
        assert all(offset <= len(text) for offset in offsets)
    text += stream.flush()
    return text, [*offsets, *stream.take_offsets()]


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


@pytest.mark.every(3)
def test_a_token_begins_in_the_character_of_its_first_byte(
    pair: tuple[Tokenizer, tokenizers.Tokenizer],
) -> None:
    ours, theirs = pair
    chance = random.Random(11)
    letters = [token for letter in "ab" for token in theirs.encode(letter, add_special_tokens=False).ids[-1:]]
    halves = theirs.encode("☃😀é", add_special_tokens=False).ids[-9:]
    for prompt in prompts(theirs, chance):
        for _ in range(4):
            some = [*halves, *letters, 2, chance.randrange(theirs.get_vocab_size())]
            new = chance.choices(some, k=6) if chance.random() < 0.7 else [*halves, *letters]
            keep = chance.random() < 0.3
            text, offsets = streamed_with_offsets(ours, prompt, new, keep, range(len(new)))
            assert offsets == streamed_with_offsets(ours, prompt, new, keep, ())[1]
            assert len(offsets) == len(new)
            for place, offset in enumerate(offsets):
                assert offset == begun(ours, prompt, new, place, keep), (prompt, new, place, keep, text)


def begun(ours: Tokenizer, prompt: Sequence[int], new: Sequence[int], place: int, keep: bool) -> int:
    """The number of the character in which a token begins, by whole decodings of what comes before it."""
    text = streamed(ours, prompt, new, keep, ())
    unfinished = PromptEnd.of(ours, prompt, keep).unfinished
    shown = [*unfinished, *(token for token in new if ours.is_visible(token, keep))]
    stop = len(unfinished) + sum(ours.is_visible(token, keep) for token in new[:place])
    if stop == len(shown):
        return len(text)
    run = 0 if ours.is_byte_level else stop  # the beginning of the bytes that are decoded together
    while run and ours.fallback_byte(shown[run - 1]) is not None:
        run -= 1
    rest = shown[run:] if ours.is_byte_level else list(itertools.takewhile(ours.fallback_byte, shown[run:]))
    before, at = (b"".join(map(ours.token_bytes, ids)) for ids in (shown[run:stop], shown[stop : stop + 1]))
    if ours.is_byte_level:
        whole = b"".join(map(ours.token_bytes, rest)).decode(errors="replace")
        return max(0, len((before + at[:1]).decode(errors="replace")) - 1 - len(whole) + len(text))
    begin = len(streamed(ours, prompt, shown[len(unfinished) : run], keep, ())) if run else 0
    if ours.fallback_byte(shown[stop]) is None:
        return len(streamed(ours, prompt, shown[len(unfinished) : stop], keep, ()))
    try:
        b"".join(map(ours.token_bytes, rest)).decode()
    except UnicodeDecodeError:
        return begin + stop - max(run, len(unfinished))  # each byte is a U+FFFD
    return begin + len(before.decode(errors="ignore"))


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
