"""The load of a program's parameters: the values of the decoder that `model/loading.py` fills, one array at a time."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tk.checkpoint import Checkpoint
from tk.checkpoint.read.shared_read import ALONE, Peers
from tk.core.casts import Array
from tk.core.dtypes import by_name
from tk.core.errors import ShapeMismatch
from tk.core.local_params import LocalParam
from tk.infer.engine.program.lower import lower
from tk.infer.engine.program.weights import load_params
from tk.model.decoder import Decoder
from tk.model.loading import load_weights
from tk.model.registry import decoder_spec
from tk.model.stored_config import stored_config
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import Group
from tk.parallel.torch_dtypes import torch_dtype
from tk.tests.model.architectures import ENTRIES

CPU = torch.device("cpu")


def load(folder: Path, dtype: str, tp: int, rank: int, peers: Peers = ALONE) -> dict[str, Array]:
    """Loads a rank's parameters and checks their shapes and dtypes."""
    checkpoint = Checkpoint.open(folder)
    spec = decoder_spec(stored_config(checkpoint))
    program = lower(spec, tp, rank)
    found: dict[str, Array] = {}

    def take(param: LocalParam, values: Array) -> None:
        assert param.name not in found
        kind = by_name("fp32" if param.name in program.wide else dtype)
        assert (values.shape, values.dtype) == (param.shape, np.dtype(kind.numpy))
        found[param.name] = values

    load_params(program.params, spec.table, checkpoint, by_name(dtype), take, peers, wide=program.wide)
    return found


def expected(folder: Path, dtype: str, tp: int, rank: int) -> dict[str, bytes]:
    """Returns the bytes of the parameters of a filled decoder."""
    checkpoint = Checkpoint.open(folder)
    decoder = Decoder(stored_config(checkpoint), LayerContext(Group(None, rank, tp), torch_dtype(dtype), CPU))
    load_weights(decoder, checkpoint)
    return {name: bytes(p.data.view(torch.uint8).numpy().tobytes()) for name, p in decoder.named_parameters()}


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(ENTRIES))
def test_parameters_are_those_of_a_filled_decoder(tmp_path: Path, name: str, dtype: str) -> None:
    ENTRIES[name].make(tmp_path)
    for tp, rank in ((1, 0), (2, 0), (2, 1)):
        found = load(tmp_path, dtype, tp, rank)
        assert {each: values.tobytes() for each, values in found.items()} == expected(tmp_path, dtype, tp, rank)


def test_ranks_that_load_together_get_the_same_as_alone(tmp_path: Path) -> None:
    ENTRIES["gpt2"].make(tmp_path)
    barrier, messages = threading.Barrier(2, timeout=60), [b"", b""]

    def peers(rank: int) -> Peers:
        def gather(mine: bytes) -> list[bytes]:
            messages[rank] = mine
            barrier.wait()
            all_messages = list(messages)
            barrier.wait()
            return all_messages

        return Peers(rank, 2, gather)

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda rank: load(tmp_path, "bf16", 2, rank, peers(rank)), range(2)))
    for rank, found in enumerate(together):
        assert {each: values.tobytes() for each, values in found.items()} == expected(tmp_path, "bf16", 2, rank)


def test_a_parameter_that_is_taken_is_not_kept(tmp_path: Path) -> None:
    ENTRIES["mixtral"].make(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = decoder_spec(stored_config(checkpoint))
    taken: list[weakref.ref[Array]] = []

    def take(param: LocalParam, values: Array) -> None:
        assert not [ref for ref in taken if ref() is not None], "the arrays before were dropped"
        taken.append(weakref.ref(values if values.base is None else values.base))

    program = lower(spec)
    load_params(program.params, spec.table, checkpoint, by_name("fp32"), take)
    assert len(taken) == len(program.params)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    ENTRIES["qwen3"].make(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = decoder_spec(stored_config(checkpoint).model_copy(update={"intermediate_size": 128}))
    with pytest.raises(ShapeMismatch, match=r"config\.json requires"):
        load_params(lower(spec).params, spec.table, checkpoint, by_name("fp32"), lambda param, values: None)
