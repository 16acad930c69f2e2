"""The result of `generate`, the same from `LLM` and `Client`, and the builder that collects events into it."""

from dataclasses import dataclass, field, replace

from .events import (
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


@dataclass(frozen=True)
class Choice:
    """One complete sample.

    Attributes:
        index: the sample's number among the n samples.
        text: the sample's final text.
        token_ids: every sampled token, including EOS and stop tokens.
        finish_reason: the reason for the sample's end.
        logprobs: one entry per token id if requested, else empty.
        matched: the stop string, stop token or EOS token that ended the sample, if one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    matched: str | int | None = None


@dataclass(frozen=True)
class Completion:
    """A completed request; `text`, `token_ids`, `finish_reason`, `logprobs` and `matched` are those of sample 0.

    Attributes:
        request_id: the request's name.
        seed: the seed of the sampling noise, given or drawn; the same seed gives the same text again.
        choices: all n samples in order.
        usage: the number of tokens of the whole request.
        timing: the times of the whole request, in seconds.
        prompt_logprobs: one entry per token of the prompt if requested, else empty.
        step: the training step of the weights that computed it; 0 for a Hugging Face folder.
        adapter_sha256: the digest of the adapter that computed it; "" for the base alone.
    """

    request_id: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    step: int = 0
    adapter_sha256: str = ""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs

    @property
    def matched(self) -> str | int | None:
        return self.choices[0].matched


@dataclass
class _SampleParts:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None


class CompletionBuilder:
    """Collects the events of one request; after Done, `completion()` returns the result."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._prompt_logprobs: list[TokenLogprob] = []
        self._samples: dict[int, _SampleParts] = {}

    def add(self, event: Event) -> None:
        """Adds one event; raises the error of a Failed event."""
        match event:
            case Started():
                self._started = event
                self._prompt_logprobs.extend(event.prompt_logprobs)
            case PromptLogprobs():
                self._prompt_logprobs.extend(event.logprobs)
            case Delta():
                sample = self._samples.setdefault(event.index, _SampleParts())
                sample.texts.append(event.text)
                sample.token_ids.extend(event.token_ids)
                sample.logprobs.extend(event.logprobs)
            case Finished():
                self._samples.setdefault(event.index, _SampleParts()).finished = event
            case Failed():
                raise event.error
            case Done():
                pass

    def completion(self) -> Completion:
        """Returns the completed request: its prompt counts once, and the other tokens of all samples are summed."""
        assert self._started is not None, "a completion is asked for before its request was started"
        choices, ends = list[Choice](), list[Finished]()
        for index, sample in sorted(self._samples.items()):
            end = sample.finished
            assert end is not None, f"a completion is asked for before sample {index} was finished"
            text, token_ids, logprobs = "".join(sample.texts), tuple(sample.token_ids), tuple(sample.logprobs)
            choices.append(Choice(index, text, token_ids, end.reason, logprobs, end.matched))
            ends.append(end)
        return Completion(
            request_id=self._started.request_id,
            seed=self._started.seed,
            choices=tuple(choices),
            usage=replace(
                ends[0].usage,
                completion_tokens=sum(end.usage.completion_tokens for end in ends),
                proposed_tokens=sum(end.usage.proposed_tokens for end in ends),
                accepted_tokens=sum(end.usage.accepted_tokens for end in ends),
            ),
            timing=Timing(
                queue_seconds=min(end.timing.queue_seconds for end in ends),
                first_token_seconds=min(end.timing.first_token_seconds for end in ends),
                total_seconds=max(end.timing.total_seconds for end in ends),
                preemptions=max(end.timing.preemptions for end in ends),
            ),
            prompt_logprobs=tuple(self._prompt_logprobs),
            step=self._started.step,
            adapter_sha256=self._started.adapter_sha256,
        )
