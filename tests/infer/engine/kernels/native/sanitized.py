"""Runs models on kernels that are built with the address and undefined-behaviour sanitizers: FOLDER..."""

import socket
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from tk.checkpoint import Checkpoint
from tk.core.casts import Array, cast
from tk.core.dtypes import FP32, DType, by_name
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.backend import Backend, DecodedAhead
from tk.infer.engine.kernels.native import prepare
from tk.infer.engine.kernels.native.binding import library
from tk.infer.engine.program.adapters import RankAdapter, UpFactor, WeightAdapter, adapted_matrices, expert_matrices
from tk.infer.engine.program.lower import lower
from tk.infer.engine.program.own_params import own_params
from tk.infer.engine.step.channel import NEXT_STEP, Channel, Frame, masks_frame, tokens_frame
from tk.infer.engine.step.running_plan import RunningPlan
from tk.infer.engine.step.sampling_rows import WITH_CANDIDATES
from tk.infer.engine.step.step_message import GivenTokens, NextTokens
from tk.infer.engine.worker.worker import load
from tk.model.registry import decoder_spec
from tk.model.stored_config import stored_config
from tk.tests.infer.engine.kernels.native.products import MODELS, portable
from tk.tests.infer.sampling_row import SamplingRow, pack

RANK = 5
FLAGS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
TOKENS = np.random.default_rng(0).integers(0, 101, 50).astype(np.int32)


def plan(start: int, stop: int, size: int) -> RunningPlan:
    """Returns the step of tokens [start, stop), every second block of the cache being the sequence's."""
    table, position = np.arange(1, 20, 2, dtype=np.int32), np.arange(start, stop, dtype=np.int32)
    return RunningPlan(
        tokens=TOKENS[start:stop].copy(),
        positions=position,
        slots=table[position // size] * size + position % size,
        span_length=np.array([stop - start], np.int32),
        block_tables=table[None],
        rows=pack([SamplingRow(token) for token in range(stop - start)]),
    )


def run(folder: str, dtype: str, kv_dtype: str, weight_dtype: str, instruction_set: str) -> None:
    """Computes a prefill and some decodes, in buffers of just the size that they need; at last without Python."""
    job = Job(folder, "native", dtype, kv_dtype, 20, 0, 16, 37, 1, 0, "", 2, instruction_set, "", weight_dtype)
    backend, adapted = load(job), load(replace(job, adapter_slots=2, max_adapter_rank=RANK))
    adapted.pack_adapter(1, random_adapter(folder, by_name(dtype)))()
    for start, stop in ((0, 37), (37, 38), (38, 40), (40, 43), (43, 50)):
        expected = backend.logits(plan(start, stop, 16))
        assert np.isfinite(expected).all()
        found = adapted.logits(replace(plan(start, stop, 16), adapters=np.array([1], np.int32)))
        assert np.isfinite(found).all()
        assert not np.array_equal(found, expected)
    for each in (backend, adapted):
        decode_ahead(each)
        each.close()  # type: ignore[attr-defined]


def random_adapter(folder: str, dtype: DType) -> RankAdapter:
    """Returns small factors beside every weight, the second one of three rows beside its last outputs.

    Norms, biases and the head are its own, too.
    """
    random = np.random.default_rng(1)

    def drawn(rows: int, columns: int) -> Array:
        return cast(random.standard_normal((rows, columns), np.float32) / 100, FP32, dtype)

    program = lower(decoder_spec(stored_config(Checkpoint.open(Path(folder)))))
    matrices = [*((matrix, 1) for matrix in adapted_matrices(program)), *expert_matrices(program)]
    beside = {
        each.name: WeightAdapter(
            drawn(count * (RANK + 1), each.in_features),
            (
                UpFactor(drawn(count * (each.out_features - 3), RANK), 0, 0, 0.5),
                UpFactor(drawn(count * 3, 1), each.out_features - 3, RANK, 2),
            ),
            count,
        )
        for each, count in matrices
    }
    own = {
        param.name: drawn(1, param.size).reshape(param.shape)
        for param in program.params
        if param.name in own_params(program)
    }
    return RankAdapter(beside, own)


def decode_ahead(backend: Backend) -> None:
    """Computes a token, and twelve tokens behind it, some in a new block; then one that a mask leads to."""
    engine, rank = socket.socketpair()
    with engine, rank:
        channel = Channel(rank, answers=True)
        place, table = np.array([42], np.int32), np.array([[1, 3, 5]], np.int32)  # models have 64 positions
        running = replace(
            plan(49, 50, 16), positions=place, slots=5 * 16 + place % 16, block_tables=table, generation=1
        )
        backend.step(running, channel=channel)
        new_block = Frame("step", body=NextTokens(np.array([[0, 9]], np.int32)).encode()).encode()
        engine.sendall(NEXT_STEP * 5 + new_block + NEXT_STEP * 6)
        ahead = backend.decode_ahead(running, channel)
        assert ahead is not None
        assert ahead.new_blocks.tolist() == [[0, 9]]
        assert running.slots.tolist() == [9 * 16 + 6]
        give_tokens(backend, engine, channel)
        rows = pack([SamplingRow(0, mask=WITH_CANDIDATES)])
        chosen = replace(plan(49, 50, 16), rows=rows, generation=2)
        backend.step(chosen, channel=channel)
        masks = masks_frame(np.array([[0, 0, 1, 0]], np.uint32), np.zeros(1, np.int32))
        engine.sendall(NEXT_STEP + masks.encode() + tokens_frame(np.array([64], np.int32)).encode())
        assert backend.decode_ahead(chosen, channel) == DecodedAhead(None)


def give_tokens(backend: Backend, engine: socket.socket, channel: Channel) -> None:
    """Computes a token, and then as many as a step has room for, some of which are given, in two new blocks."""
    first = replace(plan(19, 20, 16), generation=3)
    backend.step(first, channel=channel)
    for rows in (1, 30, 1, 30):
        message = GivenTokens(
            np.array([[20, 30, 1, rows]], np.int32),
            np.full(30, 7, np.int32),
            np.array([[0, 2, 8], [0, 3, 9]], np.int32),
        )
        engine.sendall(Frame("step", body=message.encode()).encode())
    ahead = backend.decode_ahead(first, channel)
    assert ahead is not None
    assert ahead.new_blocks.tolist() == [[0, 8], [0, 9]] * 4


def main() -> None:
    sets = (*library.instruction_sets(), *MODELS)
    prepare.instruction_sets = lambda: sets  # type: ignore[attr-defined]
    models = (unit for unit in portable().units if unit.name in MODELS)
    units = tuple(replace(unit, flags=(*unit.flags, *FLAGS)) for unit in (*library.SOURCE.units, *models))
    library.SOURCE = replace(library.SOURCE, name="sanitized", units=units, link_flags=FLAGS)  # type: ignore[misc]
    for folder in sys.argv[1:]:
        for dtypes in (
            ("fp32", "fp32", "auto"),
            ("bf16", "bf16", "auto"),
            ("fp16", "int8", "auto"),
            ("fp32", "fp32", "int8"),
            ("bf16", "bf16", "int4"),
            ("bf16", "int4", "auto"),
            ("fp32", "k8v4", "auto"),
        ):
            for instruction_set in sets:
                run(folder, *dtypes, instruction_set)
                print(Path(folder).name, *dtypes, instruction_set)


if __name__ == "__main__":
    main()
