"""Events, the output of the engine: plain values without torch or grpc.

The events of a request are one Started, PromptLogprobs of a long prompt if these are asked for, Deltas of its n samples
interleaved, one Finished per sample, and Done. At any point Failed can replace the rest.
"""

import enum
from dataclasses import dataclass, field
from typing import Final

from ....core.errors import TkError

PROMPT_LOGPROBS_PER_EVENT: Final = 256


class FinishReason(enum.Enum):
    """The reason for the end of a completed sample; the names are those of the wire."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True)
class TopLogprob:
    """One of the most probable tokens at a position: its id, natural-log probability and bytes."""

    token_id: int
    logprob: float
    token: bytes


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability (None for the first token of a prompt), its rank (1 = most probable), alternatives.

    `text_offset` is the place of the character in the sample's text in which the token begins; the text's length if the
    token adds nothing that is left in it; 0 for a token of the prompt.
    """

    token_id: int
    logprob: float | None
    rank: int
    token: bytes
    top: tuple[TopLogprob, ...] = ()
    text_offset: int = 0

    def at(self, text_offset: int) -> "TokenLogprob":
        """Returns the same with its place in the text; `dataclasses.replace` takes several times as long."""
        return TokenLogprob(self.token_id, self.logprob, self.rank, self.token, self.top, text_offset)


@dataclass(frozen=True)
class Usage:
    """The numbers of tokens of a request; of `completion_tokens`, `accepted_tokens` were among the proposed ones."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    proposed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Timing:
    """Times in seconds since submission, and the number of preemptions of the request."""

    queue_seconds: float
    first_token_seconds: float
    total_seconds: float
    preemptions: int


@dataclass(frozen=True)
class Started:
    """The request was scheduled for the first time, on the weights of training step `step`.

    `adapter_sha256` is the digest of its adapter; "" without one.
    `prompt_logprobs` has at most PROMPT_LOGPROBS_PER_EVENT entries; those after them come in PromptLogprobs.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    seed: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    step: int = 0
    adapter_sha256: str = ""


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from place `start` on, at most PROMPT_LOGPROBS_PER_EVENT."""

    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Delta:
    """New tokens of sample `index`, perhaps none. `text` may lag its tokens and is flushed before Finished.

    With log-probabilities, a token waits until its place in the text is certain.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    """Sample `index` is complete. `matched` is the stop string, stop token or EOS token that ended it."""

    index: int
    reason: FinishReason
    usage: Usage
    timing: Timing
    matched: str | int | None = None


@dataclass(frozen=True)
class Done:
    """Every sample of the request is complete."""


@dataclass(frozen=True)
class Failed:
    """The request ended without completing; no further event follows."""

    error: TkError = field(default_factory=lambda: TkError("unknown failure"))


SentEvent = Started | PromptLogprobs | Delta | Finished  # those that the caller gets
Event = SentEvent | Done | Failed


@dataclass(frozen=True)
class ModelInfo:
    """The served model; `manifest_sha256` identifies the checkpoint that training wrote.

    `kernels` is the backend and its instruction set (see `Backend`); "" before the workers have started. `aliases` are
    the other names by which requests may ask for it. `created` is when the checkpoint was committed, in seconds since
    1970: the time of its manifest, or of a Hugging Face folder's newest weight file; restarts change none of these.
    `max_adapters` may be loaded at a time, with factors of at most `max_adapter_rank`.
    """

    name: str
    architecture: str
    step: int
    manifest_sha256: str
    version: str
    api_revision: int
    tp: int
    dtype: str
    weight_dtype: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_running: int
    max_top_logprobs: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    kernels: str = ""
    aliases: tuple[str, ...] = ()
    created: int = 0
    max_adapters: int = 0
    max_adapter_rank: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model; answers have the first one."""
        return self.name, *self.aliases


@dataclass(frozen=True)
class AdapterInfo:
    """A loaded adapter.

    Attributes:
        name: the name by which requests ask for it.
        sha256: the SHA-256 of its configuration and its tensors as they are served.
        rank: the largest rank of its factors.
        bytes: the bytes of its tensors as they are served.
        step: the training step of its checkpoint; 0 for a folder of PEFT.
        live_requests: the requests that wait for it or are computed with it.
    """

    name: str
    sha256: str
    rank: int
    bytes: int
    step: int
    live_requests: int = 0
