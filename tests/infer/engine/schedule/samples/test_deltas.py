"""Texts of samples: stop strings across tokens, endings, half characters."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.infer.engine.request.events import FinishReason, TokenLogprob
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.samples.deltas import DeltaBuilder, Ending, StopStrings
from tk.text.tokenizer import Tokenizer

pieces = st.lists(st.text("abc", max_size=4), max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def by_characters(text: str, strings: list[str], include: bool) -> tuple[str, str | None]:
    """Returns the result of reading one character after the other."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(pieces, stops, st.booleans())
def test_stop_strings_do_not_depend_on_how_text_comes(given: list[str], strings: list[str], include: bool) -> None:
    stop = StopStrings(strings, include)
    out, found = "", None
    for piece in given:
        text, found = stop.push(piece, armed=True)
        out += text
        if found is not None:
            break
        assert not any(string in out for string in strings)
    else:
        out += stop.flush()
    assert (out, found) == by_characters("".join(given), strings, include)


def test_a_stop_string_counts_only_when_it_ends_in_time() -> None:
    stop = StopStrings(["ab", "abab"], include=False)
    assert stop.push("xab", armed=False) == ("x", None)  # held: "abab" may follow
    assert stop.push("c", armed=True) == ("abc", None)
    assert stop.push("a", armed=False) == ("", None)
    assert stop.push("bc", armed=True) == ("", "ab")


@pytest.fixture
def tokenizer(model_folder: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(model_folder("grouped"))


def run(tokenizer: Tokenizer, ids: list[int], **params: object) -> tuple[str, Ending | None, int]:
    """Text, ending and tokens taken of a sample that gets these ids."""
    how = SamplingParams(**params)  # type: ignore[arg-type]
    output = DeltaBuilder(0, how, tokenizer, frozenset({263}), how.max_new_tokens or 100)
    texts: list[str] = []
    for token in ids:
        delta, ending = output.push(token, None)
        texts.append(delta.text)
        assert delta.token_ids == (token,)
        if ending:
            return "".join(texts), ending, output.num_tokens
    return "".join(texts), None, output.num_tokens


def test_endings(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode("the end then")
    ids, length = [*text, 263, *tokenizer.encode("more")], len(text) + 1
    assert run(tokenizer, ids) == ("the end then", Ending(FinishReason.EOS, 263), length)
    assert run(tokenizer, ids, keep_special_tokens=True)[0] == "the end then<end>"
    assert run(tokenizer, ids, max_new_tokens=3)[1:] == (Ending(FinishReason.LENGTH), 3)
    token = tokenizer.encode(" ")[0]
    assert run(tokenizer, ids, stop_token_ids=(token,))[:2] == ("the ", Ending(FinishReason.STOP_TOKEN, token))
    found = run(tokenizer, ids, stop=("nd th", "zzz"))
    assert found[:2] == ("the e", Ending(FinishReason.STOP_STRING, "nd th"))
    assert run(tokenizer, ids, stop=("nd th",), include_stop=True)[0] == "the end th"
    assert run(tokenizer, ids, stop=("th",), min_new_tokens=4)[0] == "the end "
    assert run(tokenizer, ids, stop=("then!",))[:2] == ("the end then", Ending(FinishReason.EOS, 263))


def test_half_a_character_waits_and_is_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a€")
    assert len(ids) == 4
    assert run(tokenizer, ids, max_new_tokens=4)[0] == "a€"
    text, ending, _ = run(tokenizer, ids, max_new_tokens=3)
    assert ending == Ending(FinishReason.LENGTH)
    assert text.startswith("a\ufffd")
    assert run(tokenizer, ids[:3])[0] == "a"


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = DeltaBuilder(0, SamplingParams(), None, frozenset(), 2)
    assert output.push(5, None)[0].text == ""
    delta, ending = output.push(6, None)
    assert (delta.text, delta.token_ids, ending) == ("", (6,), Ending(FinishReason.LENGTH))


def test_a_token_waits_until_its_place_is_certain_if_its_log_probability_is_asked_for(tokenizer: Tokenizer) -> None:
    output = DeltaBuilder(0, SamplingParams(stop=("nd the",)), tokenizer, (263,), 100)
    sent, text, ending = list[list[int]](), "", None
    for token in tokenizer.encode("a€end then"):
        delta, ending = output.push(token, TokenLogprob(token, -1.0, 1, b""))
        text += delta.text
        assert delta.token_ids == tuple(entry.token_id for entry in delta.logprobs)
        sent.append([entry.text_offset for entry in delta.logprobs])
        if ending is not None:
            break
    assert (text, ending) == ("a€e", Ending(FinishReason.STOP_STRING, "nd the"))
    assert sent == [[0], [1], [], [1, 1], [2], [3], [], [], [], [3] * 4]
