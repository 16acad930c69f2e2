"""The table of GPUs: what each compute capability has, and the data sheet of a card by its driver's name."""

import pytest

from tk.core.gpu_cards import CARDS, Capability, card_named, gpu_features


@pytest.mark.parametrize(
    ("capability", "has"),
    [
        ((7, 5), ""),
        ((8, 0), "bf16 tf32 flash varlen wide_heads"),
        ((8, 6), "bf16 tf32 flash varlen"),
        ((8, 9), "bf16 fp8 tf32 flash varlen"),
        ((9, 0), "bf16 fp8 tf32 flash varlen grouped_mm wide_heads"),
        ((10, 0), "bf16 fp8 tf32 flash varlen grouped_mm wide_heads"),
        ((12, 0), "bf16 fp8 tf32 flash varlen"),
    ],
)
def test_a_capability_has_what_its_generation_brought(capability: Capability, has: str) -> None:
    features = gpu_features(capability)
    assert {name for name in features.__slots__ if getattr(features, name)} == set(has.split())
    assert ("bf16" in features.words()) == features.bf16


@pytest.mark.parametrize(
    ("name", "flops", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12),
        ("NVIDIA H100 PCIe", 756e12, 2.0e12),
        ("NVIDIA H200", 989e12, 4.8e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 1.555e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2.039e12),
        ("NVIDIA L40S", 362e12, 0.864e12),
        ("NVIDIA L4", 121e12, 0.3e12),
        ("NVIDIA B200", 2250e12, 8.0e12),
    ],
)
def test_a_card_is_known_by_its_drivers_name(name: str, flops: float, bandwidth: float) -> None:
    card = card_named(name)
    assert card is not None
    assert (card.flops, card.bandwidth) == (flops, bandwidth)


@pytest.mark.parametrize(
    "name", ["NVIDIA RTX A4000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4"]
)
def test_a_card_that_is_not_listed_has_no_figures(name: str) -> None:
    assert card_named(name) is None


def test_every_listed_card_is_found_by_its_own_name() -> None:
    for card in CARDS:
        assert card_named(f"NVIDIA {card.name}") is card
