"""The options of an engine: the checkpoint, the number of ranks, the size of the cache, the limits on requests."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import ge, gt
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ...core.argument_types import FLAG, INTEGER, NUMBER, PATH, PATHS_BY_TEXT, TEXT, TEXTS, wrong_type
from ...core.dtypes import COMPUTE_NAMES
from ...core.errors import ConfigError
from .job import threads_per_rank
from .kv_formats import KV_DTYPES

WEIGHT_DTYPES: Final = ("int8", "int4")  # of quantized weights
KERNELS: Final = ("auto", "native", "aten", "triton")
ATTENTION_TILE: Final = 256  # tokens; keys and values are read in tiles of this size, independently of the batch
_TYPES: Final = MappingProxyType(
    {
        **dict.fromkeys(("tp", "block_size", "speculate", "max_running", "max_queued", "max_batched_tokens"), INTEGER),
        **dict.fromkeys(("kv_blocks", "kv_memory", "threads", "max_model_len"), INTEGER | None),
        **dict.fromkeys(("max_queued_tokens", "quota_sequences", "quota_tokens"), INTEGER | None),
        **dict.fromkeys(("dtype", "weight_dtype", "kv_dtype", "kernels", "draft_weight_dtype"), TEXT),
        **dict.fromkeys(("prefix_cache", "numa", "batch_invariant"), FLAG),
        **dict.fromkeys(("max_step_ms", "slow_step_ms", "step_timeout"), NUMBER | None),
        "start_timeout": NUMBER,
        **dict.fromkeys(("max_restarts", "max_adapter_rank"), INTEGER),
        **dict.fromkeys(("max_adapters", "max_adapter_heads", "max_adapter_experts"), INTEGER | None),
        **dict.fromkeys(("packed", "draft"), PATH | None),
        "adapters": PATHS_BY_TEXT,
        "served_model_names": TEXTS,
    }
)
# What values other than None must be, compared with a number; in the words of an error; and whose values these are.
_BOUNDS: Final = (
    (ge, 1, "1 or more", ("tp", "kv_blocks", "kv_memory", "threads", "max_model_len", "max_running")),
    (ge, 1, "1 or more", ("max_batched_tokens", "max_queued_tokens", "quota_sequences", "quota_tokens")),
    (ge, 1, "1 or more", ("max_adapter_rank",)),
    (ge, 0, "0 or more", ("max_queued", "max_restarts", "speculate", "max_adapters")),
    (ge, 0, "0 or more", ("max_adapter_heads", "max_adapter_experts")),
    (gt, 0, "more than 0 milliseconds", ("max_step_ms", "slow_step_ms")),
    (gt, 0, "more than 0 seconds", ("step_timeout",)),
)
_NAMES: Final = MappingProxyType(
    {
        "dtype": COMPUTE_NAMES,
        "weight_dtype": WEIGHT_DTYPES,
        "draft_weight_dtype": WEIGHT_DTYPES,
        "kv_dtype": KV_DTYPES,
        "kernels": KERNELS[1:],
    }
)
MAX_NAME: Final = 200  # characters
MAX_HEAD_ROWS: Final = 64  # rows of logits at a time: more would take much memory, since the vocabulary is large


@dataclass(frozen=True)
class EngineOptions:
    """The options of `Engine.start`; the engine replaces None by a value that fits the model and the machine.

    Attributes:
        checkpoint: a step folder, a run folder (its newest committed step) or a Hugging Face folder.
        tp: the number of tensor-parallel ranks, one process each.
        dtype: the dtype of weights and activations; "auto" = as stored.
        weight_dtype: "int8" or "int4": weights are quantized as they are loaded; "auto" = `dtype`.
        kv_dtype: the dtype of the KV cache; "auto" = `dtype`.
        kv_blocks: the number of blocks of the cache; None = as `kv_memory` allows.
        kv_memory: the bytes of the cache on each rank; None = enough for `max_running` sequences, but at most 30 % of
            the free memory, and 90 % of a GPU's.
        kernels: the backend: "native" has C kernels for CPUs, "triton" has kernels for GPUs, "aten" runs everywhere on
            torch, on GPUs if the machine has one for every rank; "auto" = triton where the ranks have GPUs that it can
            use, else native where that can run the model.
        batch_invariant: whether the logits of a token have the same bits whatever is computed beside it, however its
            prompt is cut, and as part of a prompt or alone; compared at start, and refused where they differ. Native
            and ATen's kernels compute so anyway, Triton's are slower then.
        threads: the number of threads of each rank; None = OMP_NUM_THREADS if it is set, else the cores divided by
            the ranks.
        numa: whether each rank computes on the cores of one NUMA node, and so has its weights and cache in that node's
            memory; on a machine with one node it changes nothing.
        packed: the folder in which native kernels keep packed weights as files, which servers of the same model on
            this machine, and later starts, map instead of reading the checkpoint; None = each server packs its own.
        block_size: the number of tokens per block, a divisor of 256.
        prefix_cache: whether a request begins after the leading tokens whose keys and values an earlier one left in the
            cache; without it only the samples of a request share blocks.
        speculate: the largest number of proposals for the next tokens of a sequence, taken from its own text or made
            by `draft`, that a step computes and checks; 0 = none. No answer depends on it.
        draft: a smaller model with the same tokenizer, which makes the proposals, as the checkpoint is given; None:
            they are taken from the text.
        draft_weight_dtype: "int8" or "int4": the weights of `draft` are quantized as they are loaded.
        max_model_len: the largest number of tokens of a sequence, prompt included; None = the limit of the model and
            the cache.
        max_running: the largest number of sequences that are computed at the same time.
        max_queued: the largest number of sequences that wait; the engine refuses more with Overloaded, but no principal
            with less than its share.
        max_queued_tokens: the largest number of prompt tokens that wait to be computed; the engine refuses more with
            Overloaded. None = no limit, here and in the two below.
        quota_sequences: the largest number of sequences of one principal, running and waiting.
        quota_tokens: the largest number of prompt tokens of one principal that wait to be computed.
        max_batched_tokens: the largest number of tokens of a step, which bounds the delay that a long prompt causes.
        max_step_ms: the bound, in milliseconds, on the duration of steps: prompts are cut so that 99 of 100 steps are
            expected to keep it, and the engine measures a few at start. None = only `max_batched_tokens` cuts prompts.
        slow_step_ms: a step that takes longer, in milliseconds, is logged with its size; None = none is.
        start_timeout: the time, in seconds, for the workers to load the model.
        step_timeout: the time, in seconds, after which the workers of a step that is not answered count as dead; None =
            20 times the step's predicted duration, at least 120.
        max_restarts: how often the engine starts its workers again after one has died; the requests of that time fail.
        served_model_names: the names by which requests may ask for the model, the first of which answers have; none =
            the name of the run or folder.
        adapters: low-rank adapters to load at start, each a step folder, a run folder or a folder of PEFT, by the names
            under which requests ask for them.
        max_adapters: the number of adapters that may have names at the same time; None = as many as `adapters` has.
            There is a place more, in which a name's next adapter is loaded while requests use the one before.
        max_adapter_rank: the largest rank of a factor of an adapter.
        max_adapter_heads: the number of these adapters that may have a head of their own (`modules_to_save`), each as
            large as the model's; None = all of them if one of `adapters` has one, else none.
        max_adapter_experts: the number of these adapters that may have factors beside the weights of experts; None =
            all of them if one of `adapters` has some, else none.
    """

    checkpoint: Path
    _: KW_ONLY
    tp: int = 1
    dtype: str = "auto"
    weight_dtype: str = "auto"
    kv_dtype: str = "auto"
    kv_blocks: int | None = None
    kv_memory: int | None = None
    kernels: str = "auto"
    batch_invariant: bool = False
    threads: int | None = None
    numa: bool = False
    packed: Path | None = None
    block_size: int = 32
    prefix_cache: bool = True
    speculate: int = 0
    draft: Path | str | None = None
    draft_weight_dtype: str = "auto"
    max_model_len: int | None = None
    max_running: int = 64
    max_queued: int = 1024
    max_queued_tokens: int | None = None
    quota_sequences: int | None = None
    quota_tokens: int | None = None
    max_batched_tokens: int = 512
    max_step_ms: float | None = None
    slow_step_ms: float | None = None
    start_timeout: float = 600.0
    step_timeout: float | None = None
    max_restarts: int = 0
    served_model_names: Sequence[str] = ()
    adapters: Mapping[str, Path | str] = field(default_factory=dict)
    max_adapters: int | None = None
    max_adapter_rank: int = 64
    max_adapter_heads: int | None = None
    max_adapter_experts: int | None = None

    @property
    def num_adapters(self) -> int:
        """The number of adapters that may have names at the same time."""
        return len(self.adapters) if self.max_adapters is None else self.max_adapters

    @property
    def threads_per_rank(self) -> int:
        """The number of threads of each rank: see `job.threads_per_rank`."""
        return threads_per_rank(self.tp, self.threads, self.numa)

    def validate(self) -> None:
        """Checks the options as far as possible without a model.

        Raises:
            ConfigError: a value is wrong for every model; the message names the first one.
        """
        if (wrong := wrong_type(self, _TYPES)) is not None:
            name, why = wrong
            raise ConfigError(f"{name} is {why}")
        for is_right, bound, words, names in _BOUNDS:
            for name in names:
                value = getattr(self, name)
                if value is not None and not is_right(value, bound):
                    raise ConfigError(f"{name} = {value}; it must be {words}.")
        for name, known in _NAMES.items():
            value = getattr(self, name)
            if value not in ("auto", *known):
                raise ConfigError(f"{name} = {value!r}; use one of auto, {', '.join(known)}.")
        check_names("served_model_names", self.served_model_names)
        check_names("adapters", tuple(self.adapters))
        if len(self.adapters) > self.num_adapters:
            raise ConfigError(
                f"adapters has {len(self.adapters)} entries, and max_adapters is {self.max_adapters}; raise it."
            )
        if self.block_size < 1 or ATTENTION_TILE % self.block_size:
            raise ConfigError(f"block_size = {self.block_size}; it must be a power of two up to {ATTENTION_TILE}.")
        if self.max_running > self.max_batched_tokens:
            raise ConfigError(
                f"max_running = {self.max_running} is more than max_batched_tokens = {self.max_batched_tokens}; every "
                "running sequence needs a token of each step. Lower the first or raise the second."
            )
        if self.draft is not None and not self.speculate:
            raise ConfigError(f"draft = {self.draft} proposes nothing while speculate is 0. Set speculate, say to 4.")
        if self.draft is None and self.draft_weight_dtype != "auto":
            raise ConfigError(f"draft_weight_dtype = {self.draft_weight_dtype!r} has no model without draft. Set it.")
        if self.kv_blocks is not None and self.kv_memory is not None:
            raise ConfigError("kv_blocks and kv_memory both set the size of the KV cache; give only one of them.")


def check_names(option: str, names: Sequence[str]) -> None:
    """Raises ConfigError unless each name of an option can be printed, and is given once."""
    for name in names:
        if not name.isprintable() or name != name.strip() or not 1 <= len(name) <= MAX_NAME:
            raise ConfigError(
                f"{option} has {name[:40]!r}; a name has 1 to {MAX_NAME} characters that can be printed, and "
                "no space at its ends."
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"{option} = {', '.join(names)[:200]} has a name twice; give each once.")
