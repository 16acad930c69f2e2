"""The memory plan of a rank: its weights, KV cache and buffers, computed before anything is allocated."""

import math
from dataclasses import dataclass, replace
from typing import Final

from ....core import dtypes
from ....core.cuda import free_gpu_memory
from ....core.errors import ConfigError
from ....core.integers import ceil_div
from ....core.machine_memory import free_memory
from ....core.progress import format_bytes
from ....model.config import ModelConfig
from ....model.registry import decoder_spec
from ..kv_formats import BlockBytes, CacheShape
from ..options import EngineOptions
from ..program.adapters import adapter_bytes, expert_bytes
from ..program.lower import lower, serving_slices
from ..program.own_params import head_bytes
from .model_bytes import weight_bytes_per_rank
from .placement import check_kernels, on_gpus
from .rank_buffers import rank_buffers

KV_SHARE: Final = 0.3  # the cache's share of the free memory if no option sets its size
GPU_KV_SHARE: Final = 0.9  # the same where the ranks compute on GPUs, which nothing else needs


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes of a rank, and the size of the cache.

    Attributes:
        tp: the number of tensor-parallel ranks.
        dtype, weight_dtype, kv_dtype: the dtypes of the computation, of weights and of the cache.
        weight_bytes: the bytes of weights on the rank with most.
        block: the bytes of one block, and of its twin, over all layers, on one rank.
        block_size: the number of tokens of a block.
        num_blocks: the number of blocks that requests can use.
        num_twins: the number of twins in int8 that blocks of a dtype of 4 bits share; 0: each block has its own, or
            the dtype has none.
        max_model_len: the largest number of tokens of a sequence.
        max_batched_tokens: the largest number of tokens of a step.
        buffer_bytes: the bytes of activations, logits and scratch of such a step, on one rank.
        max_adapters, max_adapter_rank: the number of adapters that may have names, and their largest rank.
        adapter_bytes: the bytes of `adapter_slots` adapters of that rank, beside every linear layer, and of their
            heads and experts, on one rank.
        max_adapter_heads, max_adapter_experts: the number of adapters with names that may have a head of their own, and
            factors of experts.
        head_bytes, expert_bytes: the bytes of such a head, and of such factors of that rank, on one rank.
        draft: the plan of a draft model, a process of its own; None without one.
        draft_ranks: the number of ranks that share its bytes: all on the host, one where they have GPUs.
    """

    tp: int
    dtype: str
    weight_dtype: str
    kv_dtype: str
    weight_bytes: int
    block: BlockBytes
    block_size: int
    num_blocks: int
    num_twins: int
    max_model_len: int
    max_batched_tokens: int
    buffer_bytes: int
    max_adapters: int = 0
    max_adapter_rank: int = 0
    adapter_bytes: int = 0
    max_adapter_heads: int = 0
    head_bytes: int = 0
    max_adapter_experts: int = 0
    expert_bytes: int = 0
    draft: "MemoryPlan | None" = None
    draft_ranks: int = 1

    @property
    def adapter_slots(self) -> int:
        """The number of adapters in memory: one more than have names, since a name's next one is loaded beside it."""
        return slots_for(self.max_adapters)

    @property
    def kv_bytes(self) -> int:
        """The bytes of the cache on one rank, including twins, the null block and its twin."""
        return (self.num_blocks + 1) * self.block.block + ((self.num_twins or self.num_blocks) + 1) * self.block.twin

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of keys and values of one token over all layers and ranks, without twins."""
        return self.block.block * self.tp // self.block_size

    @property
    def total_bytes(self) -> int:
        """The bytes of weights, adapters, cache and buffers of a rank; the process and its libraries come on top.

        Each rank has its share of a draft, too.
        """
        return self.weight_bytes + self.adapter_bytes + self.kv_bytes + self.buffer_bytes + self.draft_bytes

    @property
    def draft_bytes(self) -> int:
        """The share of a rank of the bytes of a draft."""
        return 0 if self.draft is None else ceil_div(self.draft.total_bytes, self.draft_ranks)

    def table(self) -> str:
        """Formats the plan as text, one line per part."""
        note = f"up to {self.max_adapters} of rank {self.max_adapter_rank}, and the next of one"
        if self.max_adapter_heads:
            note += f"; {self.max_adapter_heads} with a head of {format_bytes(self.head_bytes)}"
        if self.max_adapter_experts:
            note += f"; {self.max_adapter_experts} with experts of {format_bytes(self.expert_bytes)}"
        adapters = [("adapters", self.dtype, self.adapter_bytes, note)] if self.max_adapters else []
        lines = (
            ("weights", self.weight_dtype, self.weight_bytes, ""),
            *adapters,
            ("KV cache", self.kv_dtype, self.kv_bytes, f"{self.num_blocks} blocks of {self.block_size} tokens"),
            ("buffers", "", self.buffer_bytes, f"for {self.max_batched_tokens} tokens per step"),
            *([("draft", self.draft.weight_dtype, self.draft_bytes, self.draft.parts)] if self.draft else []),
            ("total", "", self.total_bytes, f"on each of {self.tp} ranks"),
        )
        return "\n".join(
            f"{what:<10}{kind:<6}{format_bytes(size):>10}  {note}".rstrip() for what, kind, size, note in lines
        )

    @property
    def parts(self) -> str:
        """The bytes of weights and cache, for a reader."""
        return f"{format_bytes(self.weight_bytes)} of weights, {format_bytes(self.kv_bytes)} of KV cache"

    def table_beside(self, running: "MemoryPlan") -> str:
        """Formats the plan as `table` does, with the bytes of another set of weights that serves meanwhile."""
        lines = (("running", running.total_bytes), ("both", running.total_bytes + self.total_bytes))
        more = [f"{what:<16}{format_bytes(size):>10}  on each of {self.tp} ranks" for what, size in lines]
        return "\n".join((self.table(), *more))


def slots_for(max_adapters: int) -> int:
    """Returns the number of adapters in memory, if so many may have names."""
    return max_adapters + 1 if max_adapters else 0


def plan_memory(
    config: ModelConfig, options: EngineOptions, dtype: str, kv_dtype: str, draft: MemoryPlan | None = None
) -> MemoryPlan:
    """Plans the sizes of weights, cache and buffers.

    Args:
        config: the model.
        options: the engine's options.
        dtype, kv_dtype: the dtypes of weights and cache, with "auto" resolved.
        draft: the plan of the draft; its cache gets as many blocks.

    Raises:
        ParallelError: tp does not divide the model.
        ConfigError: kernels are asked for that cannot run, the cache cannot hold a block, `max_model_len` is more than
            model or cache can hold, or the ranks take more memory than their GPUs, or without GPUs this machine, have
            free.
    """
    weight_dtype = dtype if options.weight_dtype == "auto" else options.weight_dtype
    weight_bytes = weight_bytes_per_rank(config, options.tp, dtype, weight_dtype)
    longest = min(options.max_model_len or config.context_length, config.context_length)
    spec = decoder_spec(config)
    program = lower(spec, options.tp, 0, serving_slices(spec, options.tp, dtype))
    check_kernels(options)
    count, rank = options.num_adapters, options.max_adapter_rank if options.num_adapters else 0
    itemsize, heads = dtypes.by_name(dtype).itemsize, min(count, options.max_adapter_heads or 0)
    head, experts = head_bytes(program, itemsize), min(count, options.max_adapter_experts or 0)
    of_experts = expert_bytes(program, rank, itemsize)
    extras = slots_for(heads) * head + slots_for(experts) * of_experts
    adapters = slots_for(count) * adapter_bytes(program, rank, itemsize) + extras
    block, beside = rank_buffers(program, options, CacheShape(0, options.block_size, kv_dtype), longest, weight_dtype)
    (room, place), num_twins = _room(options), _twins_needed(options)
    sharing, fixed, part = _draft_share(draft, block, options)
    num_blocks = _num_blocks(options, room - weight_bytes - adapters - beside - fixed, block, longest, part)
    _check_length(config, options, num_blocks)
    plan = MemoryPlan(
        tp=options.tp,
        dtype=dtype,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        weight_bytes=weight_bytes,
        block=block,
        block_size=options.block_size,
        num_blocks=num_blocks,
        num_twins=num_twins if block.twin and num_twins < num_blocks else 0,
        max_model_len=min(longest, num_blocks * options.block_size),
        max_batched_tokens=options.max_batched_tokens,
        buffer_bytes=beside,
        max_adapters=count,
        max_adapter_rank=rank,
        adapter_bytes=adapters,
        max_adapter_heads=heads,
        head_bytes=head,
        max_adapter_experts=experts,
        expert_bytes=of_experts,
        draft=None if draft is None else replace(draft, num_blocks=num_blocks),
        draft_ranks=sharing,
    )
    _check_room(plan, room, place)
    return plan


def _room(options: EngineOptions) -> tuple[int, str]:
    """Returns the free bytes where a rank computes, the fullest of GPUs or its share of the host, and their place.

    Raises:
        ConfigError: a GPU cannot be opened.
    """
    if on_gpus(options):
        return min(free_gpu_memory(options.tp)), "each GPU"
    return free_memory() // options.tp, f"this machine, for each of {options.tp} ranks,"


def _twins_needed(options: EngineOptions) -> int:
    """Returns the number of twins in use at most, and as many first blocks in the prefix cache as sequences run.

    A running sequence has twins of its first block and of the one that is being filled; a step begins others.
    """
    return 4 * options.max_running + ceil_div(options.max_batched_tokens, options.block_size)


def _draft_share(draft: MemoryPlan | None, block: BlockBytes, options: EngineOptions) -> tuple[int, int, float]:
    """Returns how many ranks share a draft, a rank's bytes of it beside its cache, and the model's part of both caches.

    It is on the first GPU where ranks have GPUs.
    """
    sharing = 1 if on_gpus(options) else options.tp
    if draft is None:
        return sharing, 0, 1.0
    fixed = ceil_div(draft.weight_bytes + draft.buffer_bytes, sharing)
    return sharing, fixed, block.block / (block.block + draft.block.block / sharing)


def _num_blocks(options: EngineOptions, room_left: int, block: BlockBytes, longest: int, part: float) -> int:
    """Returns the number of blocks; `part` is the model's of the bytes of a block in its cache and in a draft's."""
    if options.kv_blocks is not None:
        return options.kv_blocks
    memory = options.kv_memory
    wanted = math.inf
    if memory is None:
        memory = int(part * (GPU_KV_SHARE if on_gpus(options) else KV_SHARE) * max(0, room_left))
        wanted = options.max_running * ceil_div(longest, options.block_size)
    num_blocks = min(block.num_blocks(memory, _twins_needed(options)), wanted)
    if num_blocks < 1:
        raise ConfigError(
            f"{format_bytes(memory)} for the KV cache of a rank is too little: two blocks of {options.block_size} "
            f"tokens take {format_bytes(2 * (block.block + block.twin))}. Raise kv_memory, or choose a smaller "
            "model or block_size."
        )
    return int(num_blocks)


def _check_room(plan: MemoryPlan, room: int, place: str) -> None:
    needed = plan.total_bytes
    if needed > room:
        count, size = plan.adapter_slots, format_bytes(plan.adapter_bytes)
        counts = ((plan.max_adapter_heads, "heads"), (plan.max_adapter_experts, "experts"))
        more = [(slots_for(number), what) for number, what in counts if number]
        extras = "".join(f", {number} with {what}" for number, what in more)
        options = "".join(f" or max_adapter_{what}" for _, what in more)
        draft = f" draft ({format_bytes(plan.draft_bytes)})," if plan.draft else ""
        adapters = f" {count} adapters of rank {plan.max_adapter_rank}{extras} ({size})," if count else ""
        raise ConfigError(
            f"Weights ({format_bytes(plan.weight_bytes)}),{adapters}{draft} KV cache ({format_bytes(plan.kv_bytes)}) "
            f"and buffers ({format_bytes(plan.buffer_bytes)}) of a rank take {format_bytes(needed)}, and {place} has "
            f"{format_bytes(room)} free. Lower kv_memory or kv_blocks{' or max_adapters' if adapters else ''}"
            f"{options}, or choose a smaller model."
        )


def _check_length(config: ModelConfig, options: EngineOptions, num_blocks: int) -> None:
    if options.max_model_len is None:
        return
    capacity = num_blocks * options.block_size
    if options.max_model_len > config.context_length:
        raise ConfigError(
            f"max_model_len = {options.max_model_len} is more than the model's {config.context_text}. Lower it, or "
            "leave it out."
        )
    if options.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len = {options.max_model_len} is more than the KV cache's {num_blocks} blocks of "
            f"{options.block_size} = {capacity} tokens. Give the cache more blocks or memory."
        )
