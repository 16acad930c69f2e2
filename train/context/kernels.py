"""Kernels for one tile of attention: forward returns log-sum-exps, with which the results of tiles are merged.

Letters: H query heads, K kv heads, of which each serves H / K query heads in turn; L queries, M keys, E head dim.
"""

from typing import Protocol

import torch

from ...core.gpu_attention import takes_flash
from ...parallel.torch_dtypes import format_of

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# The most queries, and bytes of their scores, that the portable kernel has in memory at once.
_MOST_QUERIES, _MOST_BYTES = 256, 64 << 20


class TileKernel(Protocol):
    """The attention of queries over keys: over all of them, or if `causal`, of query i over keys 0 to i."""

    def forward(
        self, q_1HLE: torch.Tensor, k_1KME: torch.Tensor, v_1KME: torch.Tensor, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output [1, H, L, E] and the log-sum-exp of each query's scores, fp32 [1, H, L].

        Args:
            q_1HLE: queries, of any strides, as are all arguments.
            k_1KME: keys; L = M if `causal`.
            v_1KME: values.
            causal: whether a query sees only the keys up to its own number.
            scale: the factor of scores; None for 1 / sqrt(E).
        """

    def backward(
        self, inputs: Tensors, grad_1HLE: torch.Tensor, out_1HLE: torch.Tensor, lse_1HL: torch.Tensor, causal: bool,
        scale: float | None,
    ) -> Tensors:  # fmt: skip
        """Returns the tile's part of the gradients of q, k and v.

        Args:
            inputs: q, k and v, as in `forward`.
            grad_1HLE: the gradient of the output over all tiles.
            out_1HLE: the output over all tiles of these queries.
            lse_1HL: the log-sum-exp over all tiles of these queries.
            causal: as in `forward`.
            scale: as in `forward`.
        """


class CpuTileKernel:
    """The kernel of torch's scaled dot product attention on a CPU."""

    def forward(
        self, q_1HLE: torch.Tensor, k_1KME: torch.Tensor, v_1KME: torch.Tensor, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a tile; see TileKernel."""
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = attend(q_1HLE, k_1KME, v_1KME, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self, inputs: Tensors, grad_1HLE: torch.Tensor, out_1HLE: torch.Tensor, lse_1HL: torch.Tensor, causal: bool,
        scale: float | None,
    ) -> Tensors:  # fmt: skip
        """Computes a tile's gradients; see TileKernel."""
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = differentiate(grad_1HLE, *inputs, out_1HLE, lse_1HL, 0.0, causal, scale=scale)
        return dq, dk, dv


class FlashTileKernel:
    """FlashAttention-2 (arXiv 2307.08691) as torch has it on CUDA devices, for 16-bit tensors; see `kernel_for`."""

    def forward(
        self, q_1HLE: torch.Tensor, k_1KME: torch.Tensor, v_1KME: torch.Tensor, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a tile; see TileKernel."""
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = attend(q_1HLE, k_1KME, v_1KME, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self, inputs: Tensors, grad_1HLE: torch.Tensor, out_1HLE: torch.Tensor, lse_1HL: torch.Tensor, causal: bool,
        scale: float | None,
    ) -> Tensors:  # fmt: skip
        """Computes a tile's gradients; see TileKernel."""
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lengths = (None, None, inputs[0].shape[2], inputs[1].shape[2])  # all rows are equally long
        seed = torch.empty(2, dtype=torch.uint64, device=lse_1HL.device)  # of a dropout that there is not
        found = (out_1HLE, lse_1HL.contiguous(), *lengths, 0.0, causal, seed, seed)  # it reads lse without strides
        dq, dk, dv = differentiate(grad_1HLE, *inputs, *found, scale=scale)
        return dq, dk, dv


class PortableTileKernel:
    """A kernel of matrix products for every device. Computes in fp32, for a few queries at once."""

    def forward(
        self, q_1HLE: torch.Tensor, k_1KME: torch.Tensor, v_1KME: torch.Tensor, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a tile; see TileKernel."""
        outs, lses, at_once = [], [], _queries_at_once(q_1HLE, k_1KME)
        for first in range(0, q_1HLE.shape[2], at_once):
            q, k, v = _grouped((q_1HLE, k_1KME, v_1KME), range(first, first + at_once), causal)
            scores = _scores(q, k, first, causal, scale)
            lse = scores.logsumexp(-1)
            outs.append(((scores - lse.unsqueeze(-1)).exp() @ v).flatten(1, 2))
            lses.append(lse.flatten(1, 2))
        return torch.cat(outs, 2).to(q_1HLE.dtype), torch.cat(lses, 2)

    def backward(
        self, inputs: Tensors, grad_1HLE: torch.Tensor, out_1HLE: torch.Tensor, lse_1HL: torch.Tensor, causal: bool,
        scale: float | None,
    ) -> Tensors:  # fmt: skip
        """Computes a tile's gradients; see TileKernel."""
        factor = inputs[0].shape[-1] ** -0.5 if scale is None else scale
        dq, dk, dv = (torch.zeros_like(each, dtype=torch.float32) for each in inputs)
        at_once = _queries_at_once(inputs[0], inputs[1])
        for first in range(0, dq.shape[2], at_once):
            some = slice(first, first + at_once)
            q, k, v = _grouped(inputs, range(first, first + at_once), causal)
            groups = (k.shape[1], -1)
            grad, out = (each[:, :, some].float().unflatten(1, groups) for each in (grad_1HLE, out_1HLE))
            shares = (_scores(q, k, first, causal, scale) - lse_1HL[:, :, some].unflatten(1, groups)[..., None]).exp()
            slopes = shares * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * factor
            dq[:, :, some] = (slopes @ k).flatten(1, 2)
            dk[:, :, : k.shape[3]] += (slopes.mT @ q).sum(2)
            dv[:, :, : k.shape[3]] += (shares.mT @ grad).sum(2)
        dtype = inputs[0].dtype
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def kernel_for(q_NHE: torch.Tensor) -> TileKernel:
    """Returns the kernel for queries and their keys, from their device, dtype and head dim."""
    if q_NHE.device.type == "cpu":
        return CpuTileKernel()
    return FlashTileKernel() if _flash_has(q_NHE) else PortableTileKernel()


def _flash_has(q_NHE: torch.Tensor) -> bool:
    """Whether torch's FlashAttention computes such queries, on this GPU and without padding."""
    if not q_NHE.is_cuda or not torch.backends.cuda.is_flash_attention_available():
        return False
    capability = torch.cuda.get_device_capability(q_NHE.device)
    return takes_flash(capability, format_of(q_NHE.dtype).name, q_NHE.shape[-1])


def _queries_at_once(q_1HLE: torch.Tensor, k_1KME: torch.Tensor) -> int:
    """Returns the number of queries whose scores, in fp32, the portable kernel has in memory at once."""
    return max(1, min(_MOST_QUERIES, _MOST_BYTES // (4 * q_1HLE.shape[1] * max(1, k_1KME.shape[2]))))


def _grouped(inputs: Tensors, numbers: range, causal: bool) -> Tensors:
    """Returns queries of these numbers [1, K, H / K, L, E], with the keys that they see [1, K, 1, M, E]."""
    q, k, v = inputs
    queries = q[:, :, numbers.start : numbers.stop].float().unflatten(1, (k.shape[1], -1))
    seen = numbers.start + queries.shape[3] if causal else k.shape[2]
    return queries, k[:, :, None, :seen].float(), v[:, :, None, :seen].float()


def _scores(q: torch.Tensor, k: torch.Tensor, first: int, causal: bool, scale: float | None) -> torch.Tensor:
    """Returns the scores of queries from number `first` on, [1, K, H / K, L, M], -inf for keys that they do not see."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        length = q.shape[3]
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores[..., first:].masked_fill_(later, -torch.inf)
    return scores
