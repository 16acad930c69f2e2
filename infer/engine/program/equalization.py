"""The factors that make the channels of keys alike before keys are rounded to 4 bits, from the weights alone.

Rotated keys have errors of one size in all channels, which grows with the mean square of a key. So if channel c of a
key is divided by s_c, and that of the queries multiplied by it, the mean square error of a score is proportional to
sum(q_c^2 s_c^2) * sum(k_c^2 / s_c^2), which is least where s_c^2 = |k_c| / |q_c|. The sizes are those that weights give
to inputs without correlations. The two channels that the rotary embedding turns together share a factor. Factors are
powers of two: dividing and multiplying by them is exact, so scores without rounding stay the same bits.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ....checkpoint.read.shared_read import ALONE, Peers
from ....core.casts import Array, cast
from ....core.dtypes import FP32, DType
from ....core.local_params import LocalParam
from ....core.quantization import untransposed
from .lower import Program
from .operations import Multiply, Norm, RotateAndAppend

MOST_DOUBLINGS: Final = 8  # a factor is 2^-8 to 2^8
Site = tuple[Norm, Multiply, RotateAndAppend]  # the operations that make a layer's queries and keys


class KeyEqualizer:
    """The sizes of the channels of a rank's queries and keys, from parameters that it is shown one by one.

    Args:
        program: the rank's program.
        dtype: the dtype of parameters that are not quantized.
    """

    def __init__(self, program: Program, dtype: DType) -> None:
        self._program, self._dtype = program, dtype
        self._sites = tuple(_sites(program))
        self._matrices = {product.matrix.name: product.matrix for _, product, _ in self._sites}
        self._vectors = {
            name
            for norm, product, append in self._sites
            for name in (norm.weight, product.matrix.bias, append.q_norm, append.k_norm)
        }
        self._squares: dict[str, Array] = {}  # of vectors by element, of matrices summed by output row; fp64
        self._holders = 1  # ranks that share a kv head

    def take(self, param: LocalParam, values: Array) -> None:
        """Keeps what matters of a parameter that was read (see `load_params`); several threads may call it."""
        if param.name in self._vectors:
            self._squares[param.name] = np.square(self._wide(param, values))
        elif param.name in self._matrices:
            self._squares[param.name] = self._row_squares(param, values)
            self._holders = max(piece.num_holders for piece in param.pieces)

    def factors(self, peers: Peers = ALONE) -> dict[int, Array]:
        """Returns the factors of each layer, fp32 [kv heads of this rank, head_dim], when every parameter was shown.

        Every rank of `peers` calls it: query heads of one kv head may be on several. They are the same at every tp.
        """
        program = self._program
        sizes = [self._sizes(site) for site in self._sites]
        queries = np.stack([each[: program.num_heads] for each in sizes])
        if self._holders > 1:
            first = peers.rank // self._holders * self._holders
            found = [np.frombuffer(each).reshape(queries.shape) for each in peers.gather(queries.tobytes())]
            queries = np.concatenate(found[first : first + self._holders], axis=1)
        keys = np.stack([each[program.num_heads :] for each in sizes])
        grouped = queries.reshape(len(sizes), program.num_kv_heads, -1, program.head_dim).mean(axis=2)
        return {site[2].layer: _factors(*both) for site, *both in zip(self._sites, keys, grouped, strict=True)}

    def _row_squares(self, param: LocalParam, values: Array) -> Array:
        program, matrix = self._program, self._matrices[param.name]
        heads = untransposed(values, matrix.num_transposed).reshape(-1, program.head_dim, matrix.in_features)
        used = heads[: program.num_heads + program.num_kv_heads]
        return np.stack([np.square(self._wide(param, rows)).sum(axis=-1) for rows in used])

    def _wide(self, param: LocalParam, values: Array) -> Array:
        is_wide = values.dtype == FP32.numpy  # as quantized weights are read
        return (values if is_wide else cast(values, self._dtype, FP32, param.name)).astype(np.float64)

    def _sizes(self, site: Site) -> Array:
        """Returns the expected squares of queries, then keys, of a layer: fp64 [heads + kv heads, head_dim]."""
        norm, product, append = site
        num_heads = self._program.num_heads
        sizes: Array = self._squares[product.matrix.name] * self._squares[norm.weight].mean()
        if product.matrix.bias:
            sizes = sizes + self._squares[product.matrix.bias][: sizes.size].reshape(sizes.shape)
        if append.q_norm:
            weights = np.stack([self._squares[append.q_norm], self._squares[append.k_norm]])
            of_head = weights[(np.arange(len(sizes)) >= num_heads).astype(int)]
            sizes = sizes / np.maximum(sizes.mean(axis=-1, keepdims=True), np.finfo(np.float64).tiny) * of_head
        if self._program.rope is None:
            return sizes
        rotated = self._program.rope.rotated(self._program.head_dim)
        turned, kept = sizes[:, :rotated], sizes[:, rotated:]
        return np.concatenate([np.tile(turned[:, : rotated // 2] + turned[:, rotated // 2 :], 2), kept], axis=1)


def _sites(program: Program) -> Iterator[Site]:
    found = program.operations
    for norm, product, append in zip(found, found[1:], found[2:], strict=False):
        if isinstance(norm, Norm) and isinstance(product, Multiply) and isinstance(append, RotateAndAppend):
            yield norm, product, append


def _factors(keys: Array, queries: Array) -> Array:
    """Returns the powers of two nearest to the best factors of channels with these squares; 1 where one has no size."""
    with np.errstate(divide="ignore", invalid="ignore"):
        doublings = np.rint(np.log2(keys / queries) / 4)
    bounded = np.clip(np.where(np.isfinite(doublings), doublings, 0), -MOST_DOUBLINGS, MOST_DOUBLINGS)
    factors: Array = np.exp2(bounded).astype(np.float32)
    return factors
