"""What goes into the engine and what comes out of it: plain values, neither torch nor grpc.

A request's life as events: one Started, then Deltas of its n samples interleaved, one Finished per sample, then Done;
or, at any point, Failed in place of all that would follow.
"""

import enum
from dataclasses import dataclass, field

from ..core.errors import TkError
from .sampling_params import SamplingParams


class FinishReason(enum.Enum):
    """Why a completed sample ended; the names are the wire's."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True)
class Request:
    """One prompt to be continued.

    Attributes:
        request_id: unique among live requests of this engine.
        prompt: token ids, special tokens included.
        params: validated by the engine at submission.
        priority: higher first.
        deadline: time.monotonic() value after which nobody waits for the answer, or None.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    deadline: float | None = None


@dataclass(frozen=True)
class TopLogprob:
    """One of the most probable alternatives at a position: id, natural-log probability, the token's bytes."""

    token_id: int
    logprob: float
    token: bytes


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability (None for the first token of a prompt), its rank (1 = most probable), alternatives."""

    token_id: int
    logprob: float | None
    rank: int
    token: bytes
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens spent by a request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timing:
    """Seconds since submission, and how often the request was preempted."""

    queue_seconds: float
    first_token_seconds: float
    total_seconds: float
    preemptions: int


@dataclass(frozen=True)
class Started:
    """The request was scheduled for the first time."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    seed: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Delta:
    """New tokens of sample `index`. `text` may lag its tokens and is flushed before Finished."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    """Sample `index` is complete. `matched` is the stop string or stop token id that ended it, if one did."""

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


Event = Started | Delta | Finished | Done | Failed


@dataclass(frozen=True)
class ModelInfo:
    """The model that is served: `manifest_sha256` shows that it is the one that was trained."""

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
