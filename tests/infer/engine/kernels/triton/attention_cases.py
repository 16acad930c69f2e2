"""The launches of attention and of what stores its keys that the gate compiles: a choice of models and formats."""

from functools import partial
from typing import Final

import torch

from tk.infer.engine.kernels.aten.kv_cache import KVCache
from tk.infer.engine.kernels.triton.append import HeadWeights, rotate_and_append
from tk.infer.engine.kernels.triton.attention import Spans
from tk.infer.engine.kernels.triton.paged_attention import LaunchedAttention
from tk.infer.engine.kernels.triton.rows.norms import NO_VECTORS, OwnVectors
from tk.infer.engine.kernels.triton.step.step_adapters import LINE
from tk.tests.infer.engine.kernels.triton.gate_case import GateCase

META: Final = torch.device("meta")
BLOCK, TOKENS, SPANS, MAX_CONTEXT = 32, 64, 16, 8192


def _launch(
    kv_dtype: str,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    adapted: bool = False,
    block: int = BLOCK,
) -> None:
    """Launches all kernels of one layer: with norms of heads, those of adapters too, and factors of 4-bit keys."""
    cache = KVCache(1, 64, kv_heads, block, dim, kv_dtype, device=META)
    qkv, query, out = (
        torch.empty(TOKENS, count * dim, dtype=dtype, device=META) for count in (heads + 2 * kv_heads, heads, heads)
    )
    slots, tables = torch.empty(TOKENS, dtype=torch.int32, device=META), torch.empty(SPANS, 256, dtype=torch.int32)
    angles = torch.empty(2, TOKENS, dim, dtype=dtype, device=META)
    norm = torch.empty(dim, dtype=dtype, device=META)
    factors = torch.empty(kv_heads, dim, device=META) if kv_dtype == "int4" else None
    lines = torch.empty(5, LINE, dtype=torch.int64, device=META)
    own = OwnVectors(torch.empty(TOKENS, dtype=torch.int32, device=META), lines) if adapted else NO_VECTORS
    weights = HeadWeights(norm, norm, factors, 1e-6, own)
    rotate_and_append(cache, 0, qkv, query, slots, (angles[0], angles[1]), weights)
    number = torch.empty(SPANS, dtype=torch.int32, device=META)
    spans = Spans(torch.empty(SPANS, 2, dtype=torch.int32, device=META), number, number, number, tables.to(META))
    attention = LaunchedAttention(cache, heads, dtype, MAX_CONTEXT)
    attention.attend(0, None, query, out, spans)
    attention.decode(0, None, query, out, spans, attention.scratch(SPANS))


_ATTENTION = ("attention_kernel",)

# Each format has all kernels for each GPU once, and a second width of heads where that comes nearer to a limit.
CASES: Final[dict[str, GateCase]] = {
    "bf16, 128 dims": GateCase(partial(_launch, "bf16", 32, 8, 128)),
    "fp8, 128 dims": GateCase(partial(_launch, "fp8", 32, 8, 128)),
    "int8, 128 dims": GateCase(partial(_launch, "int8", 32, 8, 128)),
    # 256 dims of 4 bits, below, take more registers, and one instruction of products on every GPU. So one GPU is enough
    # for these tiles, and one for the loop that only blocks below a tile of keys have.
    "int4, 128 dims": GateCase(partial(_launch, "int4", 32, 8, 128), _ATTENTION, (80,)),
    "int4, 128 dims, blocks of 16": GateCase(partial(_launch, "int4", 32, 8, 128, block=16), _ATTENTION, (90,)),
    # Here Triton 3.6 spilled with 32 rows in a tile.
    "int4, 256 dims, blocks of 16": GateCase(partial(_launch, "int4", 16, 2, 256, block=16), _ATTENTION, (90,)),
    "k8v4, 80 dims, fp16": GateCase(partial(_launch, "k8v4", 32, 32, 80, torch.float16)),
    # The most shared memory: keys of 16 bits are read ahead. Stores and merges need little.
    "bf16, 256 dims": GateCase(partial(_launch, "bf16", 16, 2, 256), _ATTENTION),
    # The most registers: all 255. Stores and merges need more, too, than those of 128 dims.
    "int4, 256 dims": GateCase(partial(_launch, "int4", 16, 2, 256)),
    "fp32, 64 dims": GateCase(partial(_launch, "fp32", 14, 2, 64, torch.float32, adapted=True)),
}
