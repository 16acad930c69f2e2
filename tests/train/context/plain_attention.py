"""Attention over whole rows by torch's own function with a mask of all pairs: the oracle of context parallelism."""

import torch
import torch.nn.functional as F

from tk.train.context.dealing import Dealing


def plain_attention(
    q_NHE: torch.Tensor, k_NKE: torch.Tensor, v_NKE: torch.Tensor, dealing: Dealing, window: int | None
) -> torch.Tensor:
    """Returns the outputs [N, H, E] of all positions of a micro-batch, in their order."""
    lengths = torch.tensor(dealing.documents)
    document_N = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    place_N = torch.arange(len(document_N))
    distance_NN = place_N.unsqueeze(-1) - place_N
    seen = (document_N.unsqueeze(-1) == document_N) & (distance_NN >= 0) & (distance_NN < (window or len(place_N)))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHE, k_NKE, v_NKE))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).squeeze(0).transpose(0, 1)


def plain_gradients(
    qkv: tuple[torch.Tensor, ...], grad_NHE: torch.Tensor, dealing: Dealing, window: int | None
) -> tuple[torch.Tensor, ...]:
    """Returns the output [N, H, E] of all positions, and the gradients of q, k and v [N, heads, E]."""
    leaves = [each.detach().requires_grad_() for each in qkv]
    out = plain_attention(leaves[0], leaves[1], leaves[2], dealing, window)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_NHE.to(out.dtype))


def random_qkv(num_positions: int, heads: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Returns the same queries, keys, values and gradient of the output [positions, heads, 16] in every process."""
    generator = torch.Generator().manual_seed(7)
    of_each = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(num_positions, number, 16, generator=generator).to(dtype) for number in of_each]


def distance(mine: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the norm of the difference, divided by the norm of the expected tensor."""
    return float((mine.double() - expected.double()).norm() / expected.double().norm())
