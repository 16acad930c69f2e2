"""The model of one rank, which carries out step plans: forward passes in tiles of fixed size, logits, the sampler."""

import torch

from ....model.config import ModelConfig
from ....model.decoder import Decoder
from ....model.experts import Router
from ....model.registry import decoder_spec
from ....parallel.collectives import all_gather
from ....parallel.layers import ColumnParallelLinear, RowParallelLinear
from ....parallel.mesh import Group
from ...scheduling.step_plan import SamplerOutput, StepPlan, spans_within
from .kv_cache import KVCache
from .paged_attention import PagedAttention
from .row_tiles import RowTile, agreeing_sizes, cut
from .sampler import run_sampler

MAX_HEAD_ROWS = 64  # rows of logits at a time: more would take much memory, since the vocabulary is large


def num_slices(config: ModelConfig, tp: int, dtype: torch.dtype) -> int:
    """Returns the number of fixed slices into which row-parallel sums are cut; 1 = the sums are not cut.

    In fp32 the slices give the same bits at every tp that divides their number. In other dtypes they are used only if
    more than two ranks would otherwise sum in an order that depends on a row's place in the batch.
    """
    if dtype == torch.float32:
        sizes = {config.num_attention_heads, *(layer.feed_forward.inner for layer in decoder_spec(config).layers)}
        fits = [n for n in (8, 4, 2) if all(size % n == 0 for size in sizes)]
        return fits[0] if fits and fits[0] % tp == 0 else 1
    return tp if tp in (4, 8, 16, 32, 64) else 1


class ModelRunner:
    """The model and the cache of one rank.

    Args:
        decoder: the rank's part of the model, with loaded weights.
        cache: the rank's KV cache.
        tp: the tensor-parallel group.
        max_batched_tokens: the largest number of tokens of a step.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, tp: Group, max_batched_tokens: int) -> None:
        self.decoder = decoder
        self.cache = cache
        self.tp = tp
        self.vocab_size = decoder.config.vocab_size
        self.num_heads = decoder.spec.num_heads // tp.size
        linears = _distinct_linears(decoder)
        dtype = linears[0].weight.dtype
        with torch.inference_mode():
            inner = [(linear, linear.in_features) for linear in linears]
            self.sizes = agreeing_sizes(inner, dtype, max_batched_tokens, tp)
            head = [(decoder.logits, decoder.config.hidden_size)]
            self.head_sizes = agreeing_sizes(head, dtype, MAX_HEAD_ROWS, tp)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> SamplerOutput | None:
        """Computes a step and stores its keys and values; returns the sampler's output on rank 0, else None."""
        logits_RV = self.logits(plan)
        return run_sampler(logits_RV.cpu(), plan.rows) if self.tp.rank == 0 else None

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Computes a step and returns the raw logits of its rows, on every rank: fp32 [R, V] without padding of V."""
        wanted = torch.from_numpy(plan.rows.token.astype("int64"))
        hidden = []
        for tile in cut(len(plan.tokens), self.sizes):
            hidden_TD = self._forward(plan, tile)
            inside = (wanted >= tile.first) & (wanted < tile.stop)
            hidden.append(hidden_TD[wanted[inside] - tile.first])
        return self._head(torch.cat(hidden))

    def _forward(self, plan: StepPlan, tile: RowTile) -> torch.Tensor:
        part = slice(tile.first, tile.stop)
        tokens, positions = torch.zeros(2, tile.size, dtype=torch.int64)
        tokens[: tile.stop - tile.first] = torch.from_numpy(plan.tokens[part])
        positions[: tile.stop - tile.first] = torch.from_numpy(plan.positions[part])
        slots = torch.from_numpy(plan.slots[part].astype("int64")).to(tokens.device)
        attention = PagedAttention(self.cache, spans_within(plan, tile.first, tile.stop), slots, self.num_heads)
        return self.decoder(tokens, positions, attention)  # type: ignore[no-any-return]

    def _head(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        pieces = [torch.empty(0, self.vocab_size)]
        for tile in cut(len(hidden_RD), self.head_sizes):
            num_rows = tile.stop - tile.first
            padded_RD = hidden_RD.new_zeros(tile.size, hidden_RD.shape[-1])
            padded_RD[:num_rows] = hidden_RD[tile.first : tile.stop]
            whole_RV = torch.cat(all_gather(self.decoder.logits(padded_RD), self.tp), dim=-1)
            pieces.append(whole_RV[:num_rows, : self.vocab_size].float())
        return torch.cat(pieces)


def _distinct_linears(decoder: Decoder) -> list[ColumnParallelLinear | RowParallelLinear | Router]:
    """Returns one layer of each kind and shape among those that multiply a whole tile of rows."""
    found: dict[tuple[type, torch.Size], ColumnParallelLinear | RowParallelLinear | Router] = {}
    for module in decoder.model.layers.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | Router):
            found.setdefault((type(module), module.weight.shape), module)
    return list(found.values())
