"""The attention of tiles of queries to tiles of keys, each a softmax over a part of the keys, and the merge of these.

Letters: N independent problems (kv heads of one sequence or of several), Q query tiles, R = 16 rows, C = 256 keys,
E head dim.
"""

from dataclasses import dataclass
from typing import Final

import torch

QUERY_ROWS: Final = 16
_LOWEST: Final = -3e38  # the maximum of no scores: finite, so that differences are never NaN


@dataclass(frozen=True, slots=True)
class Partial:
    """The softmax over a part of the keys.

    Attributes:
        largest: the largest score of each row.
        total: the sum of exp(score - largest) of each row.
        values: the sum of the values, weighted by exp(score - largest).
    """

    largest: torch.Tensor  # [N, Q, R, 1]
    total: torch.Tensor  # [N, Q, R, 1]
    values: torch.Tensor  # [N, Q, R, E]


class OnlineSoftmax:
    """The merge of partial results over consecutive tiles of keys; the first result covers every row."""

    def __init__(self) -> None:
        self._state: Partial | None = None

    def merge(self, new: Partial, where: tuple[slice, ...]) -> None:
        """Adds the partial result of further keys for the rows `where`."""
        if self._state is None:
            self._state = new
            return
        old_largest, old_total, old_values = (
            x[where] for x in (self._state.largest, self._state.total, self._state.values)
        )
        largest = torch.maximum(old_largest, new.largest)
        keep, add = torch.exp(old_largest - largest), torch.exp(new.largest - largest)
        self._state.total[where] = old_total * keep + new.total * add
        self._state.values[where] = old_values * keep + new.values * add
        self._state.largest[where] = largest

    def result(self) -> torch.Tensor:
        """Returns the attention's output, [N, Q, R, E]."""
        assert self._state is not None
        return self._state.values / self._state.total


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """Keys and values of N tiles, each fp32 [N, C, E], and their twins if there are any."""

    keys: torch.Tensor
    values: torch.Tensor
    key_twins: torch.Tensor | None = None
    value_twins: torch.Tensor | None = None


def attend_to_tiles(q_NQRE: torch.Tensor, tiles: KeyTiles, hidden: torch.Tensor, near: torch.Tensor) -> Partial:
    """Computes the attention of query tiles to one tile of keys each; the masks broadcast to [N, Q, R, C]."""
    scores_NQRC = _products(q_NQRE, tiles.keys.transpose(1, 2))
    if tiles.key_twins is not None:
        scores_NQRC = torch.where(near, _products(q_NQRE, tiles.key_twins.transpose(1, 2)), scores_NQRC)
    scores_NQRC.masked_fill_(hidden, -torch.inf)
    largest_NQR1 = scores_NQRC.amax(dim=-1, keepdim=True).clamp_min_(_LOWEST)
    weights_NQRC = scores_NQRC.sub_(largest_NQR1).exp_()
    if tiles.value_twins is None:
        values_NQRE = _products(weights_NQRC, tiles.values)
    else:
        far, close = weights_NQRC.masked_fill(near, 0.0), weights_NQRC.masked_fill(~near, 0.0)
        values_NQRE = _products(far, tiles.values) + _products(close, tiles.value_twins)
    return Partial(largest_NQR1, weights_NQRC.sum(dim=-1, keepdim=True), values_NQRE)


def _products(a_NQRX: torch.Tensor, b_NXY: torch.Tensor) -> torch.Tensor:
    """Multiplies [N, Q, R, X] by [N, X, Y] to [N, Q, R, Y], as N * Q products of one shape, without copying b."""
    if a_NQRX.shape[1] == 1:
        return torch.bmm(a_NQRX.squeeze(1), b_NXY).unsqueeze(1)
    pieces = [torch.bmm(a_QRX, b_XY.expand(len(a_QRX), -1, -1)) for a_QRX, b_XY in zip(a_NQRX, b_NXY, strict=True)]
    return torch.stack(pieces)


def query_tiles(q_NE: torch.Tensor) -> torch.Tensor:
    """Cuts [..., n, E] into tiles [..., Q, 16, E], padded with rows of zeros."""
    missing = -q_NE.shape[-2] % QUERY_ROWS
    padded: torch.Tensor = torch.nn.functional.pad(q_NE, (0, 0, 0, missing))
    return padded.unflatten(-2, (-1, QUERY_ROWS))  # type: ignore[no-any-return]
