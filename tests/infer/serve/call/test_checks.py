"""Answers that could be larger than a message are refused; the messages of all others are smaller in fact."""

import pytest

from tk.core.errors import InvalidRequest
from tk.infer.client.wire import completion_to_wire, event_to_wire
from tk.infer.engine.request.completion import Choice, Completion
from tk.infer.engine.request.events import (
    PROMPT_LOGPROBS_PER_EVENT,
    Delta,
    FinishReason,
    PromptLogprobs,
    Started,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.request.score import score_request
from tk.infer.engine.request.streams import MAX_TOKENS_PER_DELTA
from tk.infer.serve.call.checks import MAX_RESPONSE_BYTES, check_response_size, check_score_size, check_text_size
from tk.proto.v1 import generation_pb2 as pb

LARGEST = 2**32 - 1  # the widest number of a field


def entry(num_top: int, longest: int) -> TokenLogprob:
    token = b"x" * longest
    top = tuple(TopLogprob(LARGEST, -1.5, token) for _ in range(num_top))
    return TokenLogprob(LARGEST, -1.5, LARGEST, token, top, LARGEST)


def largest_new(**fixed: int) -> int:
    """The most new tokens that are accepted."""
    low, high = 0, 1 << 26
    while low < high:
        middle = (low + high + 1) // 2
        try:
            check_response_size(SamplingParams(max_new_tokens=middle, **fixed), 10, 1 << 26, 64, True)  # type: ignore[arg-type]
            low = middle
        except InvalidRequest:
            high = middle - 1
    return low


@pytest.mark.parametrize(("n", "num_top"), [(1, None), (1, 0), (1, 20), (16, None)])
def test_a_whole_answer_at_the_limit_fits_a_message(n: int, num_top: int | None) -> None:
    options = {"n": n} | ({} if num_top is None else {"logprobs": num_top})
    num_new = largest_new(**options)
    logprobs = () if num_top is None else (entry(num_top, 64),) * num_new
    choice = Choice(0, "x" * 64 * num_new, (LARGEST,) * num_new, FinishReason.STOP_STRING, logprobs, "s" * 256)
    usage, timing = Usage(LARGEST, LARGEST, LARGEST, LARGEST, LARGEST), Timing(1.5, 1.5, 1.5, LARGEST)
    size = completion_to_wire(Completion("r" * 128, LARGEST, (choice,) * n, usage, timing)).ByteSize()
    assert 0.9 * MAX_RESPONSE_BYTES < size <= MAX_RESPONSE_BYTES


def test_a_stream_has_a_limit_per_message_and_not_for_its_length() -> None:
    params = SamplingParams(max_new_tokens=1_000_000, logprobs=20)
    check_response_size(params, 10, 1 << 26, 64, at_once=False)
    widest = Delta(15, "x" * 64 * MAX_TOKENS_PER_DELTA, (LARGEST,) * MAX_TOKENS_PER_DELTA)
    delta = Delta(15, widest.text, widest.token_ids, (entry(20, 64),) * MAX_TOKENS_PER_DELTA)
    assert event_to_wire(delta).ByteSize() <= MAX_RESPONSE_BYTES
    with pytest.raises(InvalidRequest, match=r"could have \d+ bytes, and a message has at most 16777216"):
        check_response_size(params, 10, 1 << 26, 3200, at_once=False)


SCORED = SamplingParams(max_new_tokens=1, prompt_logprobs=20)


def test_log_probabilities_of_a_prompt_count_in_a_whole_answer() -> None:
    entries = MAX_RESPONSE_BYTES // (32 + 64 + 20 * 84) - 4
    check_response_size(SCORED, entries, 1 << 20, 64, at_once=True)
    usage, timing = Usage(LARGEST, LARGEST, LARGEST, LARGEST, LARGEST), Timing(1.5, 1.5, 1.5, LARGEST)
    choice = Choice(0, "x" * 64, (LARGEST,), FinishReason.LENGTH)
    scores = (entry(20, 64),) * entries
    whole = completion_to_wire(Completion("r" * 128, LARGEST, (choice,), usage, timing, scores, LARGEST))
    assert 0.9 * MAX_RESPONSE_BYTES < whole.ByteSize() <= MAX_RESPONSE_BYTES
    with pytest.raises(InvalidRequest) as caught:
        check_response_size(SCORED, entries + 5, 1 << 20, 64, at_once=True)
    assert caught.value.field == "prompt_logprobs"


@pytest.mark.parametrize("longest", [64, 3000])
def test_log_probabilities_of_a_prompt_have_several_messages_in_a_stream(longest: int) -> None:
    check_response_size(SCORED, 1_000_000, 1 << 20, longest, at_once=False)
    entries = (entry(20, longest),) * PROMPT_LOGPROBS_PER_EVENT
    started = Started("r" * 128, LARGEST, LARGEST, LARGEST, entries, LARGEST)
    for event in (started, PromptLogprobs(LARGEST, entries)):
        assert event_to_wire(event).ByteSize() <= MAX_RESPONSE_BYTES
    with pytest.raises(InvalidRequest) as caught:
        check_response_size(SCORED, 256, 1 << 20, 3200, at_once=False)
    assert caught.value.field == "prompt_logprobs"


def test_unset_new_tokens_are_those_that_the_models_length_leaves() -> None:
    params = SamplingParams(n=16)
    check_response_size(params, 100, 4096, 64, at_once=True)
    check_response_size(params, 1 << 20, (1 << 20) + 4000, 64, at_once=True)
    with pytest.raises(InvalidRequest) as caught:
        check_response_size(params, 100, 1 << 20, 64, at_once=True)
    assert caught.value.field == "max_new_tokens"


def test_a_score_at_the_limit_fits_a_message() -> None:
    most = MAX_RESPONSE_BYTES // (32 + 64 + 20 * 84) - 4
    check_score_size(most, 20, 64)
    score = pb.ScoreResponse(total=-1.5, is_greedy=True, prompt_tokens=LARGEST)
    message = event_to_wire(PromptLogprobs(0, (entry(20, 64),) * most))
    score.logprobs.extend(message.prompt_logprobs.logprobs)
    assert 0.9 * MAX_RESPONSE_BYTES < score.ByteSize() <= MAX_RESPONSE_BYTES
    with pytest.raises(InvalidRequest) as caught:
        check_score_size(most + 5, 20, 64)
    assert caught.value.field == "top"
    asked = score_request([5], [5] * most, top=20)
    check_response_size(asked.params, most - 1, 1 << 20, 64, at_once=True)


def test_a_text_at_the_limit_fits_a_message() -> None:
    check_text_size((MAX_RESPONSE_BYTES - 4096) // 64, 64)
    for longest in (1, 24, 64):
        with pytest.raises(InvalidRequest, match=r"send at most \d+ in one request") as caught:
            check_text_size(MAX_RESPONSE_BYTES // max(24, longest), longest)
        assert caught.value.field == "ids"


def test_without_a_tokenizer_there_is_no_text() -> None:
    check_response_size(SamplingParams(n=16), 100, 200_000, 0, at_once=True)
