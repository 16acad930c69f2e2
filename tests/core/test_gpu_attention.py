"""The table of attention on GPUs: every card, dtype, window and kind of rows has a kernel whose memory is bounded."""

from dataclasses import replace
from itertools import product

import pytest

from tk.core.gpu_attention import (
    MOST_MASK_BYTES,
    AttentionCase,
    attention_by_rows,
    choose_attention,
    takes_flash,
)
from tk.core.gpu_cards import Capability

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
BF16 = AttentionCase((9, 0), "bf16", 32, 8, 128, None, False, False, (2, 13))
FP32 = replace(BF16, dtype="fp32")


def test_every_row_of_the_table_has_a_kernel_without_the_square_of_a_length() -> None:
    windows = (None, 1, 4096, 131072)
    found = set()
    for capability, dtype, window, documents, deterministic, release in product(
        CAPABILITIES, ("fp32", "bf16", "fp16"), windows, (False, True), (False, True), ((2, 11), (2, 13))
    ):
        case = AttentionCase(capability, dtype, 32, 8, 128, window, documents, deterministic, release)
        choice = choose_attention(case)
        half, uneven = dtype != "fp32", documents or window is not None
        assert (
            choice.kernel
            == {
                (True, True): "varlen",
                (True, False): "flash",
                (False, True): "blocks",
                (False, False): "efficient",
            }[half, uneven]
        )
        assert choice.why
        if window is not None:
            assert choice.mask_bytes(window) <= MOST_MASK_BYTES
            assert (choice.queries > 0) == (choice.kernel == "blocks")
        assert not (choice.cudnn and (uneven or deterministic)), "cuDNN plans each length anew, and its bits change"
        assert choice.repeats == (not half or (uneven and release == (2, 11)))
        found.add(choice.kernel)
    assert found == {"varlen", "flash", "efficient", "blocks"}


@pytest.mark.parametrize(
    ("case", "kernel", "width"),
    [
        (replace(BF16, head_dim=20), "flash", 24),
        (replace(FP32, head_dim=18), "efficient", 20),
        (replace(BF16, head_dim=256, documents=True), "varlen", 256),
        (replace(BF16, head_dim=264, documents=True), "blocks", 264),
        (replace(BF16, head_dim=320), "efficient", 320),
        (replace(BF16, head_dim=200), "flash", 200),
        (replace(BF16, head_dim=200, capability=(8, 6)), "flash", 256),  # it has no backward of 193 to 224 dims
        (replace(BF16, dtype="fp16", capability=(7, 5)), "efficient", 128),
        (replace(BF16, dtype="fp16", capability=(7, 5), window=64), "blocks", 128),
    ],
)
def test_heads_are_padded_to_what_a_kernel_takes(case: AttentionCase, kernel: str, width: int) -> None:
    choice = choose_attention(case)
    assert (choice.kernel, choice.width) == (kernel, width)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (replace(BF16, capability=(7, 5)), 'compute capability 7.5, has no bf16 .* set precision.params = "fp16"'),
        (replace(BF16, dtype="f64"), "takes fp32, bf16 and fp16, not f64"),
        (replace(BF16, kv_heads=5), "32 query heads are no multiple of 5 kv heads"),
    ],
)
def test_what_no_kernel_computes_is_refused_with_a_remedy(case: AttentionCase, said: str) -> None:
    choice = choose_attention(case)
    assert choice.kernel == "refuse"
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(choice.why)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "takes"),
    [
        ((8, 0), "bf16", 128, True),
        ((9, 0), "fp16", 24, True),
        ((9, 0), "fp32", 128, False),
        ((9, 0), "bf16", 12, False),
        ((9, 0), "bf16", 320, False),
        ((8, 9), "bf16", 200, False),
        ((7, 5), "fp16", 128, False),
    ],
)
def test_tiles_take_flash_for_heads_as_they_are(capability: Capability, dtype: str, head_dim: int, takes: bool) -> None:
    assert takes_flash(capability, dtype, head_dim) == takes


def test_a_card_is_described_by_kinds_of_rows() -> None:
    found = {name: choice.kernel for name, choice in attention_by_rows((9, 0), "bf16", 128, (2, 13))}
    assert found == {"whole rows": "flash", "documents": "varlen", "a window": "varlen"}
