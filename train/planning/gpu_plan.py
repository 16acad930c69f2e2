"""What a planned run does on a GPU of some kind: the kernels of its attention, with their reasons (no torch)."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...core.cuda import Gpu
from ...core.gpu_attention import AttentionCase, choose_attention, takes_flash
from ...core.gpu_cards import card_named, gpu_features
from ...core.progress import format_count
from ..context.modes import AttentionHeads
from .planned_run import PlannedRun


@dataclass(frozen=True, slots=True)
class LayersAttention:
    """The attention of the layers of one window.

    Attributes:
        layers: how many they are, of the whole model.
        window: the number of positions that a query sees; None for all before it.
        kernel: what computes them: a kernel of core/gpu_attention.py, or "tiles" over context-parallel ranks.
        why: the reason, in words.
    """

    layers: int
    window: int | None
    kernel: str
    why: str


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """A GPU, and the attention of a run on it.

    Attributes:
        gpu: the card of every rank.
        attention: the kernels, by window.
    """

    gpu: Gpu
    attention: tuple[LayersAttention, ...]

    def lines(self) -> list[str]:
        """Returns the plan as lines of text."""
        lines = [f"{'gpu':<11}{describe_gpu(self.gpu)}"]
        for each in self.attention:
            where = "" if each.window is None else f" with a window of {each.window:,}"
            lines.append(f"{'attention':<11}{format_count(each.layers, 'layer')}{where}: {each.kernel} ({each.why})")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        attention = [asdict(each) for each in self.attention]
        return {"name": self.gpu.name, "capability": list(self.gpu.capability), "attention": attention}


def describe_gpu(gpu: Gpu) -> str:
    """Returns what a GPU is and can do."""
    card, (major, minor) = card_named(gpu.name), gpu.capability
    text = f"{gpu.name}, compute capability {major}.{minor}: {gpu_features(gpu.capability).words()}"
    if card is None:
        return text
    return f"{text}; by its data sheet {card.flops / 1e12:,.0f} TFLOP/s in bf16 and {card.bandwidth / 1e12:.2f} TB/s"


def plan_gpu(run: PlannedRun, gpu: Gpu, release: tuple[int, int]) -> GpuPlan:
    """Plans the attention of a run on GPUs of one kind; `release` is the version of torch there."""
    return GpuPlan(gpu, tuple(_attention(run, gpu, release)))


def _attention(run: PlannedRun, gpu: Gpu, release: tuple[int, int]) -> Iterator[LayersAttention]:
    config, spec, layout = run.config, run.spec, run.layout
    heads = AttentionHeads.of_rank(spec.num_heads, spec.num_kv_heads, layout.tp, layout.cp)
    dtype, documents = config.precision.params, config.data.packing == "documents"
    windows = Counter(
        None if layer.window is None or layer.window >= config.train.seq_len else layer.window for layer in spec.layers
    )
    for window, layers in windows.items():
        sizes = (heads.queries, heads.keys, spec.head_dim, window, documents)
        choice = choose_attention(AttentionCase(gpu.capability, dtype, *sizes, config.train.deterministic, release))
        if layout.cp == 1 or choice.kernel == "refuse":
            yield LayersAttention(layers, window, choice.kernel, choice.why)
        else:
            has_flash = takes_flash(gpu.capability, dtype, spec.head_dim)
            by = "FlashAttention" if has_flash else "matrix products in fp32, slowly"
            yield LayersAttention(layers, window, "tiles", f"the keys of all cp ranks, tile by tile, by {by}")
