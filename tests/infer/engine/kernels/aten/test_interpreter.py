"""The interpreter against training's modules, and its logits over two ranks against those of one."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from tk.checkpoint import Checkpoint
from tk.core.dtypes import by_name
from tk.core.layout import Layout
from tk.infer.engine.kernels.aten.interpreter import Interpreter
from tk.infer.engine.kernels.aten.kv_cache import KVCache
from tk.infer.engine.kernels.aten.model_runner import ModelRunner
from tk.infer.engine.kernels.aten.paged_attention import PagedAttention
from tk.infer.engine.kernels.aten.prepared_weights import PreparedWeights
from tk.infer.engine.kernels.step_tensors import StepTensors
from tk.infer.engine.program.lower import Program, lower, serving_slices
from tk.infer.engine.program.weights import load_params
from tk.infer.engine.step.running_plan import RunningPlan, TokenSpan
from tk.model.attention import AttendingLayer
from tk.model.decoder import Decoder
from tk.model.loading import load_weights
from tk.model.registry import decoder_spec
from tk.model.stored_config import stored_config
from tk.parallel.collectives import all_gather
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.parallel.torch_dtypes import torch_dtype
from tk.tests.infer.sampling_row import SamplingRow, pack
from tk.tests.model.architectures import ENTRIES, LENGTH, VOCAB
from tk.tests.rank_pool import RankPool
from tk.train.engine.attention import causal_attention

BLOCK, NUM_BLOCKS, ROWS = 16, 6, 16
SIMILAR = ("mistral", "qwen2", "qwen3", "gpt2 untied")  # to those that make test compares
TOLERANCES = {"fp32": 3e-6, "bf16": 0.1}  # of the mean of |difference| / (1 + |logit|); bf16 changes some routing


class Case:
    """A rank's part of a checkpoint, interpreted and in training's modules."""

    def __init__(self, folder: Path, dtype: str, tp: Group) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.config = stored_config(self.checkpoint)
        self.spec = decoder_spec(self.config)
        self.dtype, self.tp = dtype, tp
        self.decoder = Decoder(self.config, LayerContext(tp, torch_dtype(dtype), torch.device("cpu")))
        load_weights(self.decoder, self.checkpoint)

    def lower(self, num_slices: int) -> tuple[Program, PreparedWeights, KVCache]:
        program = lower(self.spec, self.tp.size, self.tp.rank, num_slices)
        weights = PreparedWeights(program, by_name(self.dtype))
        load_params(
            program.params, self.spec.table, self.checkpoint, by_name(self.dtype), weights.take, wide=program.wide
        )
        return program, weights, self.cache()

    def cache(self) -> KVCache:
        heads = max(1, self.spec.num_kv_heads // self.tp.size)
        return KVCache(len(self.spec.layers), NUM_BLOCKS, heads, BLOCK, self.spec.head_dim, self.dtype)

    def logits(self) -> torch.Tensor:
        """Returns the logits of two prompts of LENGTH tokens, as they are served."""
        program, weights, cache = self.lower(serving_slices(self.spec, self.tp.size, self.dtype))
        found = ModelRunner(program, weights, cache, self.tp, 512).logits(plan())
        return torch.from_numpy(found).view(2, LENGTH, VOCAB)

    def expected_logits(self) -> torch.Tensor:
        """Returns the logits of training's modules with plain causal attention."""
        with torch.no_grad():
            hidden = self.decoder(tokens(), torch.arange(LENGTH).expand(2, -1), causal_attention)
            return torch.cat(all_gather(self.decoder.logits(hidden), self.tp), dim=-1)[..., :VOCAB].float()

    def num_different(self) -> int:
        """Counts the elements of a tile's hidden states that differ from training's over the same paged attention."""
        program, weights, cache = self.lower(num_slices=1)
        inputs, positions = tokens()[0, :ROWS], torch.arange(ROWS)
        spans, slots = [TokenSpan(0, 0, ROWS, np.array([1]))], BLOCK + np.arange(ROWS)
        windows, numbers = {each.window for each in self.spec.layers}, StepTensors(torch.device("cpu"))
        mine, theirs = (
            PagedAttention(each, spans, slots, program.num_heads, windows, numbers) for each in (cache, self.cache())
        )
        numbers.send()

        def attend(at: AttendingLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            theirs.append(at.layer, k, v)
            return theirs.attend(at.layer, at.window, q)

        with torch.inference_mode():
            found = Interpreter(program, weights, self.tp).forward(inputs, positions, mine)
            return int((found != self.decoder(inputs, positions, attend)).sum())


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def plan() -> RunningPlan:
    """Returns the plan of both prompts in one step, in blocks 1 to 3 and 4 to 6, with the logits of every token."""
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), 2)
    return RunningPlan(
        tokens=tokens().flatten().numpy().astype(np.int32),
        positions=positions,
        slots=positions + np.repeat(np.array([1, 4], np.int32) * BLOCK, LENGTH),
        span_length=np.array([LENGTH, LENGTH], np.int32),
        block_tables=np.array([[1, 2, 3], [4, 5, 6]], np.int32),
        rows=pack([SamplingRow(token) for token in range(2 * LENGTH)]),
    )


def compare(folder: str, dtype: str) -> tuple[float, int, str]:
    """Returns the mean relative difference of logits, the number of hidden states that differ, the logits' hash."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    case = Case(Path(folder), dtype, Mesh.build(Layout(tp=size), size).tp if size > 1 else ALONE)
    found, expected = case.logits(), case.expected_logits()
    off = (found - expected).abs() / (1 + expected.abs())
    return float(off.mean()), case.num_different(), hashlib.sha256(found.numpy().tobytes()).hexdigest()


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name in SIMILAR else ()) for name in ENTRIES]
)
def test_it_computes_the_logits_of_training(tmp_path: Path, rank_pool: RankPool, name: str, dtype: str) -> None:
    ENTRIES[name].make(tmp_path)
    one = compare(str(tmp_path), dtype)
    ranks = [one, *rank_pool.run(compare, 2, folder=str(tmp_path), dtype=dtype)]
    for off, num_different, digest in ranks:
        assert off < TOLERANCES[dtype]
        if "moe" not in name and "mixtral" not in name:  # experts multiply padded tiles when served
            assert num_different == 0
        if dtype == "fp32":
            assert digest == one[2], "served in fp32, every tp that divides the slices gives the same bits"
