"""What autograd keeps of a forward pass until its backward, by formula: bytes per micro-batch on one rank. No torch.

Letters, all of this rank (divided by tp where tensor parallelism splits them): T tokens of a micro-batch, t of them
where hidden states are split along the sequence, D hidden size, H query and K kv heads of E each, I intermediate size,
V padded vocabulary; b bytes of a parameter. What a layer keeps, in elements (fp32 statistics apart):

    norm, twice      2 t D     its input            and 2 T D its output, the linear layer's input (t under sequence
                                                    parallelism, where it is gathered again)
    q, k, v          T (H + 2 K) E                  one product; v is a view of it
    rotated q, k     T (H + K) E                    where positions are rotated
    attention        T H E     its output           and T H fp32 of log-sum-exp
    SwiGLU           T 5 I     gate and up (2 I), the gate in a row, silu(gate), the product
    GELU             T 2 I     its input and its output
    experts          k T (5 I + D) for k experts per token, and 2 k T D in fp32 before and after weighting

"selective" recomputes rotation, attention (but for its output) and the activations' inner values; "full" keeps a
layer's input alone, and one layer's whole share while that one is in its backward.
"""

from dataclasses import dataclass
from typing import Literal

from ...core.dtypes import FP32
from ...core.layout import Stage
from ...model.spec import DecoderSpec, ExpertsSpec

INDEX = 8  # int64
LOSS_BLOCK = 2**18  # elements, on a CPU; on a GPU up to 64 MiB in fp32: parallel/row_blocks.py
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class PassShape:
    """What a forward pass is made of.

    Attributes:
        tokens: of a micro-batch.
        itemsize: bytes of a parameter and of an activation.
        vocab_rows: of the embedding and the head on this rank, padding included.
    """

    spec: DecoderSpec
    tokens: int
    itemsize: int
    tp: int
    vocab_rows: int
    sequence_parallel: bool
    recompute: Recompute

    @property
    def split_tokens(self) -> int:
        """Tokens whose hidden states this rank keeps between blocks."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


def stage_bytes(shape: PassShape, stage: Stage) -> int:
    """What one stage keeps of one micro-batch, the logits apart."""
    total = sum(layer_bytes(shape, layer, shape.recompute) for layer in stage.layers)
    hidden = shape.split_tokens * shape.spec.hidden_size * shape.itemsize
    if stage.first:
        total += shape.tokens * INDEX
    if stage.layers and shape.spec.rope is not None:
        total += 2 * shape.tokens * shape.spec.head_dim * shape.itemsize
    return total + (_norm_bytes(shape) + 2 * hidden if stage.last else 0)


def layer_bytes(shape: PassShape, layer: int, recompute: Recompute) -> int:
    """What one layer keeps of one micro-batch."""
    hidden = shape.split_tokens * shape.spec.hidden_size * shape.itemsize
    if recompute == "full":
        return hidden
    normed = 2 * hidden  # both norms' inputs; their outputs are what the blocks keep
    return 2 * _norm_bytes(shape) + normed + 2 * hidden + _attention(shape, recompute) + _mlp(shape, layer, recompute)


def _norm_bytes(shape: PassShape) -> int:
    """Statistics of one norm."""
    return shape.split_tokens * FP32.itemsize * (1 if shape.spec.norm == "rms" else 2)


def _attention(shape: PassShape, recompute: Recompute) -> int:
    spec = shape.spec
    heads, kv_heads = spec.num_heads // shape.tp, max(1, spec.num_kv_heads // shape.tp)
    per_token = (heads + 2 * kv_heads) * spec.head_dim * shape.itemsize + heads * spec.head_dim * shape.itemsize
    if recompute == "none":
        per_token += heads * FP32.itemsize
        per_token += (heads + kv_heads) * spec.head_dim * shape.itemsize if spec.rope else 0
    return shape.tokens * per_token


def _mlp(shape: PassShape, layer: int, recompute: Recompute) -> int:
    block = shape.spec.layers[layer].feed_forward
    inner = block.inner // shape.tp
    if isinstance(block, ExpertsSpec):
        routed = shape.tokens * block.top_k
        width = 3 if recompute == "selective" else 5
        hidden = shape.spec.hidden_size
        chosen = routed * 3 * INDEX + shape.tokens * block.num_experts * FP32.itemsize
        return chosen + routed * ((width * inner + hidden) * shape.itemsize + 2 * hidden * FP32.itemsize)
    if block.activation == "swiglu":
        return shape.tokens * (3 if recompute == "selective" else 5) * inner * shape.itemsize
    return shape.tokens * 2 * inner * shape.itemsize


def logits_bytes(shape: PassShape) -> int:
    """The most that head and loss take at once: the logits, in backward their gradient, and a block of it in fp32."""
    values = shape.tokens * shape.vocab_rows
    return 2 * values * shape.itemsize + min(values, LOSS_BLOCK) * FP32.itemsize


def backward_bytes(shape: PassShape, stage: Stage) -> int:
    """The most that one layer's backward takes beside what forward kept: gradients of its widest block, and under
    recomputation what it computes again."""
    if not stage.layers:
        return 0
    widest = max(
        _mlp(shape, layer, "none") + layer_bytes(shape, layer, "none") - layer_bytes(shape, layer, shape.recompute)
        for layer in stage.layers
    )
    return widest + shape.tokens * shape.spec.hidden_size * shape.itemsize
