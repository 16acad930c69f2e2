"""The memory that autograd keeps from a forward pass for its backward, by formula, in bytes per micro-batch (no torch).

All sizes are those of one rank, divided by tp if tensor parallelism splits them: T tokens of a micro-batch, or of them
the part of a context-parallel rank, t of them
if hidden states are split along the sequence, D hidden size, H query and K kv heads of size E, I intermediate size,
V padded vocabulary, b bytes of a parameter. A layer keeps these elements, besides fp32 statistics:

    2 norms          2 t D     their inputs         and 2 T D, their outputs, which are inputs of linear layers (2 t D
                                                    under sequence parallelism: backward gathers them again)
    q, k, v          T (H + 2 K) E                  one product; v is a view of it
    rotated q, k     T (H + K) E                    with rotary position embeddings
    attention        T H E     its output           and T H log-sum-exp values in fp32
    Ulysses          T (H + 2 R) E                  as exchanged, R = lcm(K, cp), in the place of the two lines above
                     T H E                          its output before it is sent back
    SwiGLU           T 5 I     gate and up (2 I), the contiguous gate, silu(gate), the product
    GELU             T 2 I     its input and its output
    experts          k T (5 I + 2 D) for k experts per token: the tokens, and the outputs before they are weighted
    shared expert    T 5 I, and T (D + 1) in fp32: its output and the weight of that

Offloaded activations are on the host between the two passes; `returned_bytes` are on the device for backward.

"selective" recomputes the rotation, attention except its output, and the inner values of activations. "full" keeps
only the input of each layer, and all values of the one layer that is in its backward. A dense MLP that computes in
blocks of rows keeps nothing but its input, which is the output of its norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.dtypes import FP32
from ...core.integers import ceil_div
from ...core.layout import Stage
from ...core.places import Spread
from ...model.spec import DecoderSpec, DenseSpec, ExpertsSpec
from ...parallel.logits_blocks import rows_at_once
from ..context.modes import AttentionHeads, Mode, Recompute

INDEX = 8  # int64
SMALL_BLOCK = 2**18  # elements on a CPU; on a GPU up to 64 MiB in fp32, see parallel/row_blocks.py


@dataclass(frozen=True, slots=True)
class PassShape:
    """The sizes that determine the memory of a forward pass.

    Attributes:
        tokens: the number of tokens of a micro-batch.
        itemsize: bytes of a parameter and of an activation.
        mlp_tokens: the tokens that a dense MLP computes at once, and again in backward; 0 = all, as `recompute` says.
        vocab_rows: rows of the embedding and of the head on this rank, padding included.
        cp: the number of context-parallel ranks.
        cp_mode: how attention gets the keys of their positions.
        experts: how ranks hold experts, if these are on different ranks; None if they are split over tp.
    """

    spec: DecoderSpec
    tokens: int
    itemsize: int
    tp: int
    vocab_rows: int
    sequence_parallel: bool
    recompute: Recompute
    mlp_tokens: int = 0
    cp: int = 1
    cp_mode: Mode = "gather"
    experts: Spread | None = None

    @property
    def heads(self) -> AttentionHeads:
        """The heads of a tensor-parallel rank."""
        return AttentionHeads.of_rank(self.spec.num_heads, self.spec.num_kv_heads, self.tp, self.cp)

    @property
    def exchanges_heads(self) -> bool:
        """Whether context-parallel ranks exchange positions for heads."""
        return self.cp > 1 and self.cp_mode == "ulysses"

    @property
    def routed_tokens(self) -> int:
        """The number of tokens whose experts a rank computes if all ranks get as many, or a part of each expert."""
        return self.tokens if self.experts is None else ceil_div(self.tokens, self.tp) * self.experts.tp

    @property
    def split_tokens(self) -> int:
        """The number of tokens whose hidden states this rank keeps between blocks."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


def stage_bytes(shape: PassShape, stage: Stage) -> int:
    """Returns the bytes that one stage keeps for one micro-batch, without those of `head_gradient_bytes`."""
    total = sum(layer_bytes(shape, layer, shape.recompute) for layer in stage.layers) + _shared(shape, stage)
    hidden = shape.split_tokens * shape.spec.hidden_size * shape.itemsize
    return total + (_norm_bytes(shape) + 2 * hidden if stage.last else 0)


def returned_bytes(shape: PassShape, stage: Stage, deferred: int) -> int:
    """Returns the most bytes of offloaded activations that are on the device for the backward of one stage.

    Args:
        shape: the sizes of the pass.
        deferred: the number of micro-batches whose weight gradients wait, with the inputs of linear layers; counted
            with all that the stage keeps.
    """
    largest = max((layer_bytes(shape, layer, shape.recompute) for layer in stage.layers), default=0)
    return largest + _shared(shape, stage) + deferred * stage_bytes(shape, stage)


def staying_bytes(shape: PassShape, stage: Stage, head_moves: bool) -> int:
    """Returns the bytes of a stage's activations that stay on the device though they are offloaded.

    Recomputed parts refer to the rotations as they are. The gradient of the head's input stays; see
    train/engine/stages.py.
    """
    rotations = 0 if shape.recompute == "none" else _rotation_bytes(shape, stage)
    head_input = shape.split_tokens * shape.spec.hidden_size * shape.itemsize
    return rotations + (head_input if stage.last and not head_moves else 0)


def _shared(shape: PassShape, stage: Stage) -> int:
    """Returns the bytes that are kept once for all layers: token ids, and rotations of positions."""
    return (shape.tokens * INDEX if stage.first else 0) + _rotation_bytes(shape, stage)


def _rotation_bytes(shape: PassShape, stage: Stage) -> int:
    if not stage.layers or shape.spec.rope is None:
        return 0
    return 2 * shape.tokens * shape.spec.head_dim * shape.itemsize


def head_gradient_bytes(shape: PassShape) -> int:
    """Returns the bytes of the gradient of the head's weight, which the loss keeps if its backward is the next pass."""
    return shape.vocab_rows * shape.spec.hidden_size * shape.itemsize


def layer_bytes(shape: PassShape, layer: int, recompute: Recompute) -> int:
    """Returns the bytes that one layer keeps for one micro-batch."""
    hidden = shape.split_tokens * shape.spec.hidden_size * shape.itemsize
    if recompute == "full":
        return hidden
    inputs, outputs = 2 * hidden, 2 * hidden  # of both norms
    mlp = 0 if _in_blocks(shape, layer) else _mlp(shape, layer, recompute)
    inner = _attention(shape, recompute) + mlp + _adapters(shape, layer)
    return 2 * _norm_bytes(shape) + inputs + outputs + inner


def _adapters(shape: PassShape, layer: int) -> int:
    """Returns the bytes of the products A x of a layer's adapters, which tensor parallelism does not divide.

    Their inputs are those of linear layers, which are counted without adapters, too.
    """
    if not shape.spec.adapters:
        return 0
    block, total = shape.spec.layers[layer].feed_forward, 0
    routed = shape.routed_tokens * block.top_k if isinstance(block, ExpertsSpec) else 0
    for tensor in shape.spec.table:
        if tensor.layer == layer and tensor.name in shape.spec.adapters and not tensor.expert:  # experts have one rank
            tokens = shape.tokens if tensor.expert is None else routed
            total += tokens * shape.spec.adapters[tensor.name].rank
    return total * shape.itemsize


def _norm_bytes(shape: PassShape) -> int:
    """Returns the bytes of the statistics of one norm."""
    return shape.split_tokens * FP32.itemsize * (1 if shape.spec.norm == "rms" else 2)


def _attention(shape: PassShape, recompute: Recompute) -> int:
    spec, heads, kv_heads = shape.spec, shape.heads.queries, shape.heads.keys
    vectors = (heads + 2 * kv_heads) + heads
    if recompute == "none" and shape.exchanges_heads:
        vectors = heads + 2 * shape.heads.repeated_keys + 2 * heads  # q, k, v and output as exchanged, and the output
    elif recompute == "none":
        vectors += heads + kv_heads if spec.rope else 0
    per_token = vectors * spec.head_dim * shape.itemsize + (heads * FP32.itemsize if recompute == "none" else 0)
    return shape.tokens * per_token


def _in_blocks(shape: PassShape, layer: int) -> bool:
    return bool(shape.mlp_tokens) and isinstance(shape.spec.layers[layer].feed_forward, DenseSpec)


def exchange_bytes(shape: PassShape) -> int:
    """Returns the most bytes of keys and values of other ranks, and of their gradients, that attention has at once.

    "gather" has keys and values of two groups of kv heads, and gradients of one in fp32; a group takes no more than
    this rank's keys of all heads, or is one head. "ulysses" has what it sends beside what it receives.
    """
    if shape.cp == 1:
        return 0
    if shape.exchanges_heads:
        vectors = 2 * (shape.heads.queries + 2 * shape.heads.repeated_keys)
        return shape.tokens * vectors * shape.spec.head_dim * shape.itemsize
    keys = 2 * max(shape.heads.keys, shape.cp) * shape.tokens * shape.spec.head_dim
    return keys * (2 * shape.itemsize + FP32.itemsize)


def _mlp(shape: PassShape, layer: int, recompute: Recompute) -> int:
    """Returns the bytes of the inner values of a feed-forward block, for `mlp_tokens` if it computes in blocks."""
    tokens = shape.mlp_tokens if _in_blocks(shape, layer) else shape.tokens
    block = shape.spec.layers[layer].feed_forward
    if isinstance(block, ExpertsSpec):
        expert_tp = shape.tp if shape.experts is None else shape.experts.tp
        routed, inner = shape.routed_tokens * block.top_k, block.inner // expert_tp
        width = 3 if recompute == "selective" else 5
        hidden = shape.spec.hidden_size
        chosen = routed * 3 * INDEX + shape.routed_tokens * block.num_experts * FP32.itemsize
        own = chosen + routed * (width * inner + 2 * hidden) * shape.itemsize
        return own + (shape.tokens * _shared_expert(shape, block.shared, width) if block.shared else 0)
    inner = block.inner // shape.tp
    if block.activation == "swiglu":
        return tokens * (2 if recompute == "selective" else 5) * inner * shape.itemsize
    return tokens * (1 if recompute == "selective" else 2) * inner * shape.itemsize


def _shared_expert(shape: PassShape, block: DenseSpec, width: int) -> int:
    """Returns the bytes per token of a shared expert, whose output is weighted in fp32."""
    return width * (block.inner // shape.tp) * shape.itemsize + (shape.spec.hidden_size + 1) * FP32.itemsize


def loss_bytes(shape: PassShape) -> int:
    """Returns the peak of head and loss.

    It has a block of logits, which becomes its gradient, a smaller one in fp32, the hidden states of whole sequences if
    they are split, their gradient, and that of the weight, in low precision with its sum in fp32 and a block's term.
    """
    values = logits_block(shape)
    hidden = shape.tokens * shape.spec.hidden_size * shape.itemsize
    total = values * shape.itemsize + min(values, SMALL_BLOCK) * FP32.itemsize + head_gradient_bytes(shape)
    if values < shape.tokens * shape.vocab_rows and shape.itemsize < FP32.itemsize:
        total += shape.vocab_rows * shape.spec.hidden_size * FP32.itemsize
    return total + hidden * (2 if shape.sequence_parallel else 1)


def logits_block(shape: PassShape) -> int:
    """Returns the elements of the logits that are computed at once."""
    return min(shape.tokens, rows_at_once(shape.vocab_rows)) * shape.vocab_rows


def backward_bytes(shape: PassShape, stage: Stage) -> int:
    """Returns the peak of one layer's backward beside the memory that forward kept.

    It holds the gradients of the layer's widest block, and with recomputation the values that are computed again; an
    MLP in blocks has both for one block, and the sums of its weights' gradients.
    """
    if not stage.layers:
        return 0
    widest = max(
        _mlp(shape, layer, "none")
        + (_mlp(shape, layer, "none") + _gradient_sums(shape, layer) if _in_blocks(shape, layer) else 0)
        + layer_bytes(shape, layer, "none")
        - layer_bytes(shape, layer, shape.recompute)
        for layer in stage.layers
    )
    return max(widest, exchange_bytes(shape)) + shape.tokens * shape.spec.hidden_size * shape.itemsize


def _gradient_sums(shape: PassShape, layer: int) -> int:
    """Returns the bytes of the sums of the gradients of an MLP's weights over blocks, in fp32."""
    block = shape.spec.layers[layer].feed_forward
    matrices = 3 if isinstance(block, DenseSpec) and block.activation == "swiglu" else 2
    return matrices * shape.spec.hidden_size * (block.inner // shape.tp) * FP32.itemsize


def wide_logits_bytes(shape: PassShape, held: Sequence[Stage]) -> int:
    """Returns the bytes of a block in fp32 if parameters have less: a CPU without kernels rounds it afterwards."""
    wide = shape.itemsize < FP32.itemsize and any(stage.last for stage in held)
    return logits_block(shape) * FP32.itemsize if wide else 0


def free_bytes(shape: PassShape, held: Sequence[Stage]) -> int:
    """Returns the bytes that malloc holds free on a CPU when a rank's memory is largest, measured rather than derived.

    Blocks that live for one layer, or for the loss, leave room between those that stay, which is split for smaller ones
    and does not hold the next large block. It comes to the blocks' own size once more, in fp32 also for bf16: products
    of bf16 have copies in fp32 on CPUs without instructions for them. Of the loss it is its own size and a block of
    logits more. docs/benchmarks/training_memory.md has figures.
    """
    wide = replace(shape, itemsize=FP32.itemsize)
    loss = loss_bytes(wide) + logits_block(wide) * FP32.itemsize if any(stage.last for stage in held) else 0
    return loss + max(backward_bytes(wide, stage) for stage in held)
