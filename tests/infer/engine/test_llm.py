"""`LLM`: forms of prompts, several samples, streams, and requests that it refuses as a whole."""

from collections.abc import Sequence

import pytest

from tk.core.errors import InvalidRequest
from tk.infer import LLM, SamplingParams
from tk.infer.engine.engine import Engine
from tk.tests.infer.engine.free_blocks import num_free_blocks

GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)


def test_prompt_forms(llm: LLM) -> None:
    assert llm.engine.tokenizer is not None
    ids = llm.engine.tokenizer.encode("abc on")
    by_text, by_ids = llm.generate("abc on", GREEDY)[0], llm.generate(ids, GREEDY)[0]
    assert by_text.token_ids == by_ids.token_ids
    forms: list[str | Sequence[int]] = ["abc on", ids, (1, 2)]
    mixed = llm.generate(forms, [GREEDY, GREEDY, SamplingParams(temperature=0, max_new_tokens=2)])
    assert [completion.token_ids for completion in mixed[:2]] == [by_text.token_ids] * 2
    assert len(mixed[2].token_ids) <= 2
    assert llm.generate([], GREEDY) == []
    streamed = list(llm.stream("abc on", GREEDY))
    assert tuple(token for delta in streamed for token in delta.token_ids) == by_text.token_ids
    assert "".join(delta.text for delta in streamed) == by_text.text


def test_samples_differ_and_repeat_by_seed(llm: LLM) -> None:
    params = SamplingParams(seed=3, n=4, max_new_tokens=10, ignore_eos=True)
    (first,), (second,) = llm.generate("the", params), llm.generate("the", params)
    assert first.choices == second.choices
    assert len({choice.token_ids for choice in first.choices}) == 4
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert first.text == first.choices[0].text
    assert first.usage.completion_tokens == 40
    drawn = llm.generate(["the", "the"], SamplingParams(max_new_tokens=10, ignore_eos=True))
    assert drawn[0].seed != drawn[1].seed


def test_leaving_a_stream_early_ends_its_request(llm: LLM) -> None:
    stream = llm.stream([1, 2], SamplingParams(max_new_tokens=600, ignore_eos=True))
    assert next(stream).token_ids
    stream.close()  # type: ignore[attr-defined]
    llm.generate([1], GREEDY)  # steps after the abort
    assert (llm.engine.num_live, num_free_blocks(llm.engine)) == (0, llm.engine.info.num_blocks)


def test_one_request_that_cannot_be_served_ends_all_of_its_call(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="is not one of the vocabulary's"):
        llm.generate([[1, 2], [1, 9999]], GREEDY)
    with pytest.raises(InvalidRequest, match="2 SamplingParams for 1 prompts"):
        llm.generate([[1]], [GREEDY, GREEDY])
    llm.generate([1], GREEDY)  # steps after the abort of the first
    assert (llm.engine.num_live, num_free_blocks(llm.engine)) == (0, llm.engine.info.num_blocks)


def test_text_needs_a_tokenizer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "tokenizer", None)
    with pytest.raises(InvalidRequest, match=r"has no tokenizer\.json, .* or give token ids") as error:
        llm.generate("the", GREEDY)
    assert error.value.field == "prompt"
