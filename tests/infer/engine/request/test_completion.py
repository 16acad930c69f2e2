"""Events of one request, gathered into its completion."""

import pytest

from tk.core.errors import Cancelled
from tk.infer.engine.request.completion import Choice, Completion, CompletionBuilder
from tk.infer.engine.request.events import (
    Delta,
    Done,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    Timing,
    TokenLogprob,
    Usage,
)

PROMPT = TokenLogprob(1, None, 0, b"a")
FIRST, SECOND = TokenLogprob(5, -0.5, 1, b"x"), TokenLogprob(6, -1.5, 2, b"y")


def build(*events: Event) -> Completion:
    """Returns the completion of events."""
    builder = CompletionBuilder()
    for event in events:
        builder.add(event)
    return builder.completion()


def test_samples_are_gathered_from_events_in_any_order() -> None:
    found = build(
        Started("r", 3, 1, 9, (PROMPT,), step=12),
        PromptLogprobs(1, (SECOND,)),
        PromptLogprobs(2, (FIRST,)),
        Delta(1, "b", (7,)),
        Delta(0, "x", (5,), (FIRST,)),
        Finished(1, FinishReason.EOS, Usage(3, 1, 1), Timing(0.5, 0.75, 1.0, 0)),
        Delta(0, "yz", (6,), (SECOND,)),
        Finished(0, FinishReason.STOP_STRING, Usage(3, 1, 2), Timing(0.25, 1.0, 2.0, 3), "z"),
        Done(),
    )
    first = Choice(0, "xyz", (5, 6), FinishReason.STOP_STRING, (FIRST, SECOND), "z")
    second = Choice(1, "b", (7,), FinishReason.EOS)
    usage = Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=3)
    timing = Timing(queue_seconds=0.25, first_token_seconds=0.75, total_seconds=2.0, preemptions=3)
    assert found == Completion("r", 9, (first, second), usage, timing, (PROMPT, SECOND, FIRST), 12)


def test_a_completion_shows_its_first_sample() -> None:
    first = Choice(0, "xyz", (5, 6), FinishReason.STOP_TOKEN, (FIRST, SECOND), 6)
    second = Choice(1, "b", (7,), FinishReason.EOS)
    found = Completion("r", 9, (first, second), Usage(3, 0, 3), Timing(0, 0, 0, 0))
    shown = (found.text, found.token_ids, found.finish_reason, found.logprobs, found.matched)
    assert shown == ("xyz", (5, 6), FinishReason.STOP_TOKEN, (FIRST, SECOND), 6)


def test_a_sample_without_deltas_is_empty() -> None:
    end = Finished(0, FinishReason.EOS, Usage(3, 0, 0), Timing(0, 0, 0, 0))
    found = build(Started("r", 3, 0, 9), end, Done())
    assert (found.text, found.token_ids, found.logprobs) == ("", (), ())


def test_a_failure_is_raised() -> None:
    error = Cancelled("enough")
    with pytest.raises(Cancelled, match="enough") as caught:
        build(Started("r", 3, 0, 9), Failed(error))
    assert caught.value is error


def test_a_completion_is_not_made_before_its_end() -> None:
    with pytest.raises(AssertionError, match="before its request was started"):
        build()
    with pytest.raises(AssertionError, match="before sample 0 was finished"):
        build(Started("r", 3, 0, 9), Delta(0, "x", (5,)))
