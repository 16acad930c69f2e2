"""What NVIDIA's GPUs can do, by their compute capability, and the data sheets of some cards (no torch).

One table for all that asks: the report of `tk doctor`, the planner, and the engines' choice of kernels.
"""

import re
from dataclasses import dataclass
from typing import Final

Capability = tuple[int, int]
_LESS_OF_A_CARD: Final = re.compile(r"\b(MIG|Laptop|Max-Q|D)\b")  # a slice, or a slower one of the same name


@dataclass(frozen=True, slots=True)
class GpuFeatures:
    """What a GPU of some compute capability can do.

    Attributes:
        bf16: products of bf16 in hardware, and torch's kernels for it.
        fp8: products of fp8.
        tf32: fp32 products of operands that are rounded to TF32's 10 bits.
        flash: torch's FlashAttention of 16-bit heads.
        varlen: the same for rows of several lengths, and in windows.
        grouped_mm: one product of all experts; elsewhere torch multiplies each by itself, too, and waits for lengths.
        wide_heads: backward of flash and varlen for heads of more than 192 and up to 224 dims.
    """

    bf16: bool
    fp8: bool
    tf32: bool
    flash: bool
    varlen: bool
    grouped_mm: bool
    wide_heads: bool

    def words(self) -> str:
        """Returns what the GPU has, in words."""
        named = {
            "bf16": self.bf16,
            "fp8": self.fp8,
            "TF32": self.tf32,
            "flash attention": self.flash,
            "varlen attention": self.varlen,
            "grouped products": self.grouped_mm,
        }
        return ", ".join(name for name, has in named.items() if has) or "fp32 and fp16 only"


def gpu_features(capability: Capability) -> GpuFeatures:
    """Returns what a GPU of a compute capability, such as (9, 0), can do."""
    ampere = capability >= (8, 0)
    return GpuFeatures(
        bf16=ampere,
        fp8=capability >= (8, 9),
        tf32=ampere,
        flash=ampere,
        varlen=ampere,
        grouped_mm=capability[0] in (9, 10),
        wide_heads=ampere and capability not in ((8, 6), (8, 9)) and capability[0] != 12,
    )


@dataclass(frozen=True, slots=True)
class GpuCard:
    """What NVIDIA's data sheet says of a card.

    Attributes:
        name: the part of the driver's name that only it has.
        capability: its compute capability.
        flops: FLOP/s of dense bf16 products with fp32 sums; fp16 has the same.
        bandwidth: bytes per second of its memory.
    """

    name: str
    capability: Capability
    flops: float
    bandwidth: float


CARDS: Final = (
    GpuCard("GB200", (10, 0), 2500e12, 8.0e12),
    GpuCard("B200", (10, 0), 2250e12, 8.0e12),
    GpuCard("GH200 480GB", (9, 0), 989e12, 4.0e12),
    GpuCard("H200", (9, 0), 989e12, 4.8e12),
    GpuCard("H100 PCIe", (9, 0), 756e12, 2.0e12),
    GpuCard("H100 NVL", (9, 0), 835e12, 3.9e12),
    GpuCard("H100", (9, 0), 989e12, 3.35e12),
    GpuCard("L40S", (8, 9), 362e12, 0.864e12),
    GpuCard("L40", (8, 9), 181e12, 0.864e12),
    GpuCard("L4", (8, 9), 121e12, 0.3e12),
    GpuCard("RTX 4090", (8, 9), 165e12, 1.008e12),
    GpuCard("RTX 5090", (12, 0), 209e12, 1.792e12),
    GpuCard("A100-SXM4-80GB", (8, 0), 312e12, 2.039e12),
    GpuCard("A100 80GB PCIe", (8, 0), 312e12, 1.935e12),
    GpuCard("A100", (8, 0), 312e12, 1.555e12),
    GpuCard("A40", (8, 6), 149.7e12, 0.696e12),
    GpuCard("A10G", (8, 6), 70e12, 0.6e12),
    GpuCard("A10", (8, 6), 125e12, 0.6e12),
    GpuCard("RTX A6000", (8, 6), 154.8e12, 0.768e12),
    GpuCard("RTX 3090", (8, 6), 71e12, 0.936e12),
)


def card_named(name: str) -> GpuCard | None:
    """Returns the card of a driver's name, such as "NVIDIA H100 80GB HBM3"; None for one that is not listed."""
    if _LESS_OF_A_CARD.search(name):
        return None
    found = [card for card in CARDS if re.search(rf"\b{card.name}\b", name)]
    return max(found, key=lambda card: len(card.name), default=None)
