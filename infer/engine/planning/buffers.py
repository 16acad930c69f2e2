"""The size of a rank's memory beside weights and cache: rows of activations, logits, and the scratch of threads."""

from typing import Final

from ....core.integers import ceil_div, round_up
from ..kv_formats import GROUP
from ..options import ATTENTION_TILE, MAX_HEAD_ROWS
from ..program.lower import Program
from ..program.operations import Gate, Head, Multiply, Route, RunExperts
from ..program.quantization import groupings

_FLOAT: Final = 4  # bytes; activations are computed in fp32
_LINE: Final = 16  # floats; rows begin on cache lines
_LARGE_PAGE: Final = 2**21  # bytes; a buffer of this size or more is committed in such pages
_QUERY_ROWS: Final = 24  # of attention at a time
_PRODUCT_ROWS: Final = 12  # of a matrix product at a time
_ROUNDED_BYTES: Final = 2  # of a value in bf16
_ROUNDED_ROWS, _ROUNDED_COLUMNS = 16, 32  # of a block of rows that are rounded to bf16
_EXPERT_ROWS: Final = 64  # tokens that go through the experts together
_SAMPLER_BYTES: Final = 21  # per token of the vocabulary


def buffer_bytes(program: Program, max_tokens: int, threads: int, weight_dtype: str = "auto") -> int:
    """Returns the largest number of bytes that a step of native kernels needs beside weights and cache, on one rank.

    Args:
        program: the program of rank 0, which holds the logits of all ranks.
        max_tokens: the largest number of tokens of a step.
        threads: the number of threads of the rank.
        weight_dtype: see EngineOptions; products with quantized weights take wider rows.
    """
    width = _prepared_width(program, weight_dtype)
    head = next(each.matrix for each in program.operations if isinstance(each, Head))
    vocabulary = round_up(head.out_features, _LINE) * program.tp
    num_parts = 1 if program.tp == 1 else 2  # the ranks' parts, and these joined
    logits = min(MAX_HEAD_ROWS, max_tokens) * vocabulary * num_parts
    link = 2 * max_tokens * program.hidden_size if program.tp > 1 else 0
    floats = (
        *(max_tokens * width for width in _widths(program)),
        *(logits, link, _expert_floats(program), threads * _scratch_floats(program, width)),
    )
    rounded = _ROUNDED_BYTES * round_up(max_tokens, _ROUNDED_ROWS) * width
    sampler = threads * _SAMPLER_BYTES * vocabulary
    return sum(map(_committed, (*(_FLOAT * count for count in floats), rounded))) + sampler


def _committed(num_bytes: int) -> int:
    return num_bytes if num_bytes < _LARGE_PAGE else round_up(num_bytes, _LARGE_PAGE)


def _widths(program: Program) -> tuple[int, ...]:
    """Returns the numbers of a token in each buffer of rows (see program/operations.py)."""
    dim = round_up(program.head_dim, _LINE)
    heads, kv_heads = program.num_heads * dim, program.num_kv_heads * dim
    inner = max((each.matrix.out_features for each in _products(program) if each.target == "inner"), default=0)
    gated = max((each.columns for each in program.operations if isinstance(each, Gate)), default=0)
    routes = [each for each in program.operations if isinstance(each, Route)]
    scores = max((each.matrix.out_features + 2 * each.top_k for each in routes), default=0)
    widths = (*[program.hidden_size] * 3, heads + 2 * kv_heads, heads, heads, inner, gated, scores)
    return (dim, *(round_up(width, _LINE) for width in widths))


def _scratch_floats(program: Program, width: int) -> int:
    dim = round_up(program.head_dim, _LINE)
    row = 4 * dim + ATTENTION_TILE * 3 // 2 + 8 + ceil_div(program.head_dim, GROUP)
    page = dim * ATTENTION_TILE  # of integers, widened; a block has no more tokens
    attention = _QUERY_ROWS * row + ATTENTION_TILE + page
    return attention + _PRODUCT_ROWS * (round_up(program.hidden_size, _LINE) + width // 2)


def _prepared_width(program: Program, weight_dtype: str) -> int:
    """Returns the room, in values of 2 bytes, of the widest row that a product prepares.

    Rows are rounded to bf16, and slices padded to whole blocks; or they are kept in fp32 for a quantized weight.
    """
    experts = [each for each in program.operations if isinstance(each, RunExperts)]
    shapes = [(program.hidden_size, 1)]  # of routers, heads, and the first products of experts
    shapes += [(each.matrix.in_features, each.num_slices) for each in _products(program)]
    shapes += [(each.inner, each.num_slices) for each in experts]
    rounded = max(slices * round_up(columns // slices, _ROUNDED_COLUMNS) for columns, slices in shapes)
    columns_of = {each.matrix.name: each.matrix.in_features for each in _products(program)}
    columns_of |= {each.down: each.inner for each in experts}
    quantized = groupings(program, weight_dtype).items()
    floats = [each.row_floats(columns_of.get(name, program.hidden_size)) for name, each in quantized]
    return max([rounded, *(2 * count for count in floats)])


def _expert_floats(program: Program) -> int:
    experts = [each for each in program.operations if isinstance(each, RunExperts)]
    if not experts:
        return 0
    top_k = max(each.top_k for each in program.operations if isinstance(each, Route))
    inner, slices = max(each.inner for each in experts), max(each.num_slices for each in experts)
    row = round_up(2 * inner, _LINE) + round_up(inner, _LINE) + slices * round_up(program.hidden_size, _LINE)
    return _EXPERT_ROWS * top_k * (row + 2) + max(each.num_experts for each in experts) + 1


def _products(program: Program) -> list[Multiply]:
    return [each for each in program.operations if isinstance(each, Multiply)]
