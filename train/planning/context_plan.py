"""How the ranks of a run compute attention over cp: one answer for its plan and for its ranks (no torch)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...model.spec import DecoderSpec
from ..config.train_config import TrainConfig
from ..context.fetched_keys import fetched_shares
from ..context.modes import AttentionHeads, Mode, Recompute, choose_mode


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The settings of attention over context-parallel ranks.

    Attributes:
        row_length: the number of positions of a row.
        wanted: [parallel] cp_mode.
        recompute: what backward computes again.
        windows: the attention window of each layer of the model; None for no window.
        heads: the heads of a tensor-parallel rank, with the number of context-parallel ranks.
        multiple: the number that must divide each rank's number of positions of a row.
    """

    row_length: int
    wanted: Mode | Literal["auto"]
    recompute: Recompute
    windows: tuple[int | None, ...]
    heads: AttentionHeads
    multiple: int

    @classmethod
    def of(cls, config: TrainConfig, spec: DecoderSpec) -> "ContextPlan":
        """Returns the settings of a run of a model."""
        parallel = config.parallel
        return cls(
            row_length=config.train.seq_len,
            wanted=parallel.cp_mode,
            recompute=config.recompute.mode,
            windows=tuple(layer.window for layer in spec.layers),
            heads=AttentionHeads.of_rank(spec.num_heads, spec.num_kv_heads, parallel.tp, parallel.cp),
            multiple=parallel.tp if parallel.sequence_parallel else 1,
        )

    @property
    def mode(self) -> Mode:
        """How attention gets the keys of other ranks; raises ParallelError if the heads do not allow the wanted way."""
        return choose_mode(self.wanted, self.heads, self.recompute, self.fetched(self.windows))

    def fetched(self, windows: Sequence[int | None]) -> float:
        """Returns the share of other ranks' keys that "gather" fetches, as a mean over layers with these windows."""
        if self.heads.cp == 1 or not windows:
            return 0.0
        shares = fetched_shares(self.row_length, self.windows, self.heads.cp, self.multiple)
        return sum(shares[window] for window in windows) / len(windows)
