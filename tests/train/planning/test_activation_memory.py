"""The formula of activations equals the memory that autograd keeps."""

from dataclasses import replace

import pytest
import torch

from tk.core.layout import Stage
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.lora.options import LoraOptions
from tk.model.lora.table import with_adapters
from tk.model.registry import decoder_spec
from tk.model.spec import DecoderSpec
from tk.parallel.layers import LayerContext
from tk.parallel.logits_blocks import ELEMENTS
from tk.parallel.mesh import ALONE
from tk.tests.model.decoders import whole_loss
from tk.tests.train.planning.small_models import MODELS
from tk.train.context.modes import Recompute
from tk.train.planning.activation_memory import (
    SMALL_BLOCK,
    PassShape,
    backward_bytes,
    free_bytes,
    head_gradient_bytes,
    layer_bytes,
    loss_bytes,
    stage_bytes,
    staying_bytes,
)


def _kept_by_autograd(
    config: ModelConfig,
    dtype: torch.dtype,
    rows: int,
    length: int,
    recompute: Recompute = "none",
    loss_waits: bool = False,
    mlp_block: int = 0,
    spec: DecoderSpec | None = None,
) -> int:
    """Returns the bytes of distinct memory that autograd keeps of a forward pass, without parameters.

    With a `spec` parameters are frozen as it says.
    """
    context = LayerContext(ALONE, dtype, torch.device("cpu"))
    decoder = Decoder(config, context, recompute=recompute, mlp_block=mlp_block, spec=spec)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for local in decoder.local_params():
        decoder.get_parameter(local.name).requires_grad_(local.trainable)
    own = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # kept alive, so that its address is not used again
        return tensor

    tokens = torch.randint(0, config.vocab_size, (rows, length + 1))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        whole_loss(decoder, tokens[:, :-1], tokens[:, 1:], loss_waits=loss_waits)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_those_that_autograd_keeps(name: str, dtype: str) -> None:
    config, itemsize = ModelConfig(**MODELS[name]), 4 if dtype == "fp32" else 2
    dtypes = {4: torch.float32, 2: torch.bfloat16}
    measured = _kept_by_autograd(config, dtypes[itemsize], 4, 48)
    spec = decoder_spec(config)
    shape = PassShape(spec, 4 * 48, itemsize, 1, config.vocab_size, False, "none")
    planned = stage_bytes(shape, Stage(range(len(spec.layers))))
    assert planned + head_gradient_bytes(shape) == pytest.approx(measured, rel=0.03)
    waiting = _kept_by_autograd(config, dtypes[itemsize], 4, 48, loss_waits=True)
    assert planned == pytest.approx(waiting, rel=0.03), "a loss that waits keeps its input alone"


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_adapters_keep_their_products_with_a(name: str, recompute: Recompute) -> None:
    """Compared is what adapters of a larger rank keep more: a frozen base keeps less than the plan says."""
    config = ModelConfig(**MODELS[name])
    specs = [with_adapters(decoder_spec(config), LoraOptions(rank=rank)) for rank in (4, 36)]
    kept = [_kept_by_autograd(config, torch.float32, 4, 48, recompute, spec=spec) for spec in specs]
    shapes = [PassShape(spec, 4 * 48, 4, 1, config.vocab_size, False, recompute) for spec in specs]
    planned = [stage_bytes(shape, Stage(range(len(shape.spec.layers)))) for shape in shapes]
    assert planned[1] - planned[0] == pytest.approx(kept[1] - kept[0], rel=0.03)
    assert kept[1] < planned[1] + head_gradient_bytes(shapes[1])


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_activations_are_not_kept(name: str, recompute: Recompute) -> None:
    """Autograd saves the inputs of recomputed parts; rotations, which these only refer to, are added."""
    config = ModelConfig(**MODELS[name])
    measured = _kept_by_autograd(config, torch.float32, 4, 48, recompute)
    spec = decoder_spec(config)
    shape, stage = PassShape(spec, 4 * 48, 4, 1, config.vocab_size, False, recompute), Stage(range(len(spec.layers)))
    moving = stage_bytes(shape, stage) - staying_bytes(shape, stage, head_moves=True)
    assert moving + head_gradient_bytes(shape) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("name", MODELS)
def test_an_mlp_in_blocks_keeps_its_input_alone(name: str) -> None:
    config = ModelConfig(**MODELS[name])
    measured = _kept_by_autograd(config, torch.float32, 4, 48, mlp_block=7)
    spec = decoder_spec(config)
    shape, stage = (
        PassShape(spec, 4 * 48, 4, 1, config.vocab_size, False, "none", 4 * 7),
        Stage(range(len(spec.layers))),
    )
    assert stage_bytes(shape, stage) + head_gradient_bytes(shape) == pytest.approx(measured, rel=0.03)


def _shape(recompute: Recompute, tp: int = 1, sequence_parallel: bool = False) -> PassShape:
    """Returns a pass of 10 tokens in bf16 through the small Llama: D = 64, H = 4, K = 2, E = 16, I = 160."""
    return PassShape(decoder_spec(ModelConfig(**MODELS["llama"])), 10, 2, tp, 512, sequence_parallel, recompute)


def test_a_layer_keeps_the_activations_of_the_table() -> None:
    statistics = 2 * 10 * 4  # of two norms, fp32
    norms = 4 * 10 * 64 * 2
    attention = 10 * ((4 + 2 * 2) * 16 + 4 * 16) * 2
    rotated, log_sum_exp = 10 * (4 + 2) * 16 * 2, 10 * 4 * 4
    none = statistics + norms + attention + rotated + log_sum_exp + 10 * 5 * 160 * 2
    assert layer_bytes(_shape("none"), 0, "none") == none
    assert layer_bytes(_shape("none"), 0, "selective") == statistics + norms + attention + 10 * 2 * 160 * 2
    assert layer_bytes(_shape("none"), 0, "full") == 10 * 64 * 2, "its input alone"


def test_tensor_parallel_ranks_divide_blocks_and_with_sequence_parallelism_the_norms_too() -> None:
    alone = layer_bytes(_shape("none"), 0, "none")
    norms = 2 * 10 * 4 + 4 * 10 * 64 * 2
    assert layer_bytes(_shape("none", tp=2), 0, "none") == norms + (alone - norms) // 2
    assert layer_bytes(_shape("none", tp=2, sequence_parallel=True), 0, "none") == alone // 2


def test_backward_holds_a_layer_again_where_it_is_recomputed() -> None:
    stage = Stage(range(3), first=False, last=False)
    gradients = 10 * 5 * 160 * 2 + 10 * 64 * 2
    assert backward_bytes(_shape("none"), stage) == gradients
    again = layer_bytes(_shape("none"), 0, "none") - 10 * 64 * 2
    assert backward_bytes(_shape("full"), stage) == gradients + again
    assert backward_bytes(_shape("full"), Stage(range(0))) == 0


def test_backward_holds_one_block_of_an_mlp_and_the_sums_of_its_weights() -> None:
    stage, shape = Stage(range(3), first=False, last=False), replace(_shape("none"), mlp_tokens=2)
    values, sums = 2 * 5 * 160 * 2, 3 * 160 * 64 * 4
    assert backward_bytes(shape, stage) == 2 * values + sums + 10 * 64 * 2
    longer = replace(shape, tokens=1000)
    assert backward_bytes(longer, stage) == 2 * values + sums + 1000 * 64 * 2, "nothing of L x I"
    kept = layer_bytes(_shape("none"), 0, "none") - 10 * 5 * 160 * 2
    assert layer_bytes(shape, 0, "none") == layer_bytes(shape, 0, "selective") + 10 * 6 * 16 * 2 + 10 * 4 * 4 == kept


def test_the_loss_holds_a_block_of_logits_and_gradients() -> None:
    weight, hidden = 512 * 64, 10 * 64
    assert loss_bytes(_shape("none")) == 10 * 512 * (2 + 4) + (weight + hidden) * 2
    assert loss_bytes(_shape("none", tp=2, sequence_parallel=True)) == 10 * 512 * (2 + 4) + (weight + 2 * hidden) * 2
    large = replace(_shape("none"), tokens=10**6)
    assert loss_bytes(large) == ELEMENTS * 2 + SMALL_BLOCK * 4 + weight * (2 + 4) + 10**6 * 64 * 2, "nothing of L x V"
    in_fp32 = replace(large, itemsize=4)
    assert loss_bytes(in_fp32) == ELEMENTS * 4 + SMALL_BLOCK * 4 + weight * 4 + 10**6 * 64 * 4, "added in place"


def test_malloc_holds_the_blocks_of_a_layer_and_of_the_loss_free_once_more_in_fp32() -> None:
    inner, last = Stage(range(3), first=False, last=False), Stage(range(3), first=False)
    in_fp32 = replace(_shape("full"), itemsize=4)
    assert free_bytes(_shape("full"), [inner]) == backward_bytes(in_fp32, inner) > backward_bytes(_shape("full"), inner)
    assert free_bytes(_shape("full"), [inner, last]) == free_bytes(in_fp32, [last]) > backward_bytes(in_fp32, last)
    logits = 10 * 512 * 4
    assert free_bytes(_shape("none"), [last]) == loss_bytes(in_fp32) + logits + backward_bytes(
        replace(in_fp32, recompute="none"), last
    )
