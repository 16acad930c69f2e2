"""A program as the structures that the kernels run: on one rank products add to hidden, on several they are reduced."""

from ctypes import Array as CArray

import numpy as np
import pytest

from tk.core.dtypes import FP32
from tk.core.errors import TkError
from tk.infer.engine.kernels.native.adapters import AdapterSlots
from tk.infer.engine.kernels.native.binding.library import instruction_sets, load_kernels
from tk.infer.engine.kernels.native.binding.structures import Buffer, OperationKind, PreparedOperation
from tk.infer.engine.kernels.native.operations import _plain, prepare_operations
from tk.infer.engine.kernels.native.packing import PackedWeights
from tk.infer.engine.program.lower import Program, lower
from tk.infer.engine.program.operations import SampleTokens
from tk.model.spec import EMBEDDING, POSITIONS
from tk.tests.infer.engine.program.test_lower import spec_of

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
LAYER = "model.layers.0"
LAYER_KINDS = ["NORM", "MULTIPLY", "APPEND", "ATTEND", "MULTIPLY"]
DENSE_KINDS = ["NORM", "MULTIPLY", "GATE", "MULTIPLY"]


def packed(program: Program) -> PackedWeights:
    """Returns the program's weights, all zero."""
    kernels = load_kernels("baseline")
    assert kernels is not None
    weights = PackedWeights(program, FP32, kernels)
    for param in program.params:
        weights.take(param, np.zeros(param.shape, np.float32))
    return weights


def no_slots(program: Program, weights: PackedWeights) -> AdapterSlots:
    return AdapterSlots(program, weights, 0)


def prepared(architecture: str, tp: int = 1, **options: object) -> tuple[PackedWeights, CArray[PreparedOperation]]:
    program = lower(spec_of(architecture, num_hidden_layers=1, **options), tp)
    weights = packed(program)
    return weights, prepare_operations(program, weights, no_slots(program, weights))


def kinds(operations: CArray[PreparedOperation]) -> list[str]:
    return [OperationKind(each.kind).name for each in operations]


def test_one_rank_reduces_nothing() -> None:
    _, operations = prepared("llama")
    assert kinds(operations) == ["EMBED", *LAYER_KINDS, *DENSE_KINDS, "NORM", "HEAD"]
    products = [each for each in operations if each.kind == OperationKind.MULTIPLY]
    assert [(Buffer(each.source), Buffer(each.target), each.add) for each in products] == [
        (Buffer.NORMED, Buffer.QKV, 0),
        (Buffer.ATTENDED, Buffer.HIDDEN, 1),
        (Buffer.NORMED, Buffer.INNER, 0),
        (Buffer.GATED, Buffer.HIDDEN, 1),
    ]
    assert operations[0].target == Buffer.HIDDEN


def test_several_ranks_reduce_the_embedding_and_every_row_parallel_product() -> None:
    _, operations = prepared("llama", tp=2)
    layer = [*LAYER_KINDS, "REDUCE", *DENSE_KINDS, "REDUCE"]
    assert kinds(operations) == ["EMBED", "REDUCE", *layer, "NORM", "HEAD"]
    assert [each.add for each in operations if each.kind == OperationKind.REDUCE] == [0, 1, 1], "the first one writes"
    assert operations[0].target == Buffer.PARTIAL


def test_the_bias_of_a_sum_is_added_once() -> None:
    name = f"{LAYER}.self_attn.o_proj.bias"
    weights, operations = prepared("gpt2")
    [product] = [each for each in operations if each.source == Buffer.ATTENDED and each.kind == OperationKind.MULTIPLY]
    assert product.matrix.bias == weights.vectors[name].ctypes.data
    weights, operations = prepared("gpt2", tp=2)
    [product] = [each for each in operations if each.source == Buffer.ATTENDED and each.kind == OperationKind.MULTIPLY]
    assert product.matrix.bias is None
    reduced = [each.offset for each in operations if each.kind == OperationKind.REDUCE]
    assert reduced[1] == weights.vectors[name].ctypes.data


def test_only_the_last_norm_is_computed_for_wanted_rows_alone() -> None:
    _, operations = prepared("qwen3")
    assert [each.wanted for each in operations if each.kind == OperationKind.NORM] == [0, 0, 1]
    [append] = [each for each in operations if each.kind == OperationKind.APPEND]
    assert append.weight is not None, "qwen3 norms its queries"


def test_a_tied_table_is_read_from_the_panels_of_the_head() -> None:
    weights, operations = prepared("llama", tie_word_embeddings=True)
    embed, head = operations[0], operations[len(operations) - 1]
    assert (embed.variant, embed.matrix.data) == (1, head.matrix.data)
    assert not embed.table
    weights, operations = prepared("gpt2", tie_word_embeddings=False)
    assert (operations[0].variant, operations[0].table) == (0, weights.tables[EMBEDDING].ctypes.data)
    assert operations[0].positions == weights.tables[POSITIONS].ctypes.data


def test_experts_take_the_number_that_the_router_chooses() -> None:
    options = {"num_local_experts": 4, "num_experts_per_tok": 3}
    for tp, target in ((1, Buffer.HIDDEN), (2, Buffer.PARTIAL)):
        _, operations = prepared("mixtral", tp, **options)
        [route] = [each for each in operations if each.kind == OperationKind.ROUTE]
        [experts] = [each for each in operations if each.kind == OperationKind.EXPERTS]
        assert (route.experts, route.top_k, experts.experts, experts.top_k) == (4, 3, 4, 3)
        assert (experts.target, experts.add) == (target, int(tp == 1))


def test_the_sum_of_a_shared_expert_is_weighted_before_it_is_added() -> None:
    for tp in (1, 2):
        weights, operations = prepared("qwen2_moe", tp)
        after = kinds(operations)[kinds(operations).index("EXPERTS") + 1 :]
        assert after == [*(["REDUCE"] if tp > 1 else []), "MULTIPLY", "GATE", "MULTIPLY", "REDUCE", "NORM", "HEAD"]
        [product] = [each for each in operations if each.kind == OperationKind.MULTIPLY and each.source == Buffer.GATED]
        assert (product.target, product.add) == (Buffer.PARTIAL, 0)
        gates = [each.weight for each in operations if each.kind == OperationKind.REDUCE and each.weight]
        assert gates == [weights.vectors[f"{LAYER}.mlp.shared_expert_gate.weight"].ctypes.data]


def test_an_operation_that_no_kernel_runs_is_named() -> None:
    program = lower(spec_of("llama"))
    weights = packed(program)
    with pytest.raises(TkError, match="does not run SampleTokens"):
        _plain(SampleTokens(), program, weights, no_slots(program, weights))
