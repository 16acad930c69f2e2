"""Ranks of one host load together: each block is read once, each byte is checked, all ranks raise the error of one."""

import gc
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from tk.checkpoint import Checkpoint, StoredArray
from tk.checkpoint.format import chunk
from tk.checkpoint.read import chunk_blocks, read_plan, shared_read
from tk.checkpoint.read.read_plan import AREA, ReadPlanner, ReadRequest
from tk.checkpoint.read.shared_read import Peers, read_all
from tk.core.buckets import buckets, shards
from tk.core.casts import Array
from tk.core.errors import ShardCorrupt, StorageError
from tk.core.layout import Layout
from tk.core.local_params import local_params
from tk.core.tensors import Split, TensorSpec
from tk.tests.checkpoint.faults import watched
from tk.tests.checkpoint.saving import MIXED, assert_equal, mixed_table, save_step, true_values
from tk.tests.checkpoint.thread_peers import counted_reads, together

SLOTS = {"weight": "F32", "exp_avg": "F32"}
TABLE = (
    TensorSpec("model.embed_tokens.weight", (1001, 1024), Split(0, rule="pad")),
    TensorSpec("model.layers.0.q_proj.weight", (1024, 1024), Split(0, 64), 0, "qkv"),
    TensorSpec("model.layers.0.k_proj.weight", (128, 1024), Split(0, 64, "replicate"), 0, "qkv"),
    TensorSpec("model.layers.0.o_proj.weight", (1024, 1024), Split(1, 64), 0),
    TensorSpec("model.layers.0.down_proj.weight", (1024, 4608), Split(1), 0),  # 18 MiB: more than a block
    TensorSpec("model.layers.0.c_attn.weight", (256, 3072), Split(1, 64, sections=3), 0),
    TensorSpec("model.layers.0.norm.weight", (1024,), None, 0),
)
LOGICAL = 4 * sum(math.prod(spec.shape) for spec in TABLE)  # bytes of one slot


def held(table: tuple[TensorSpec, ...], layout: Layout, rank: int) -> list[ReadRequest]:
    """Returns the requests of an inference rank: every weight that it holds."""
    params = local_params(table, layout, rank)
    return [ReadRequest(piece.tensor.name, piece.box) for param in params for piece in param.pieces]


def updated(table: tuple[TensorSpec, ...], layout: Layout, rank: int, slots: dict[str, str]) -> list[ReadRequest]:
    """Returns the requests of a training rank: the ranges that it updates, of every slot."""
    params = buckets(local_params(table, layout, rank), layout)
    mine = shards(params, layout, rank)
    return [ReadRequest(shard.piece.tensor.name, shard.piece.box, slot, shard.flat) for slot in slots for shard in mine]


def load(path: Path, requests: list[ReadRequest], peers: Peers) -> list[Array]:
    """The values of every want, after a check that each came once."""
    found: dict[int, Array] = {}

    def deliver(index: int, values: StoredArray) -> None:
        assert index not in found
        found[index] = values.numpy()

    read_all(Checkpoint.open(path), requests, deliver, peers)
    return [found[index] for index in range(len(requests))]


def load_together(path: Path, requests: list[list[ReadRequest]]) -> list[Any]:
    """Returns the results of each rank's requests, or their error."""
    return together(len(requests), lambda peers: load(path, requests[peers.rank], peers))


def check(requests: list[ReadRequest], found: Any, table: tuple[TensorSpec, ...], slots: dict[str, str]) -> None:
    """Bit for bit as it was saved."""
    assert not isinstance(found, Exception), repr(found)
    specs = {spec.name: spec for spec in table}
    for request, values in zip(requests, found, strict=True):
        spec = specs[specs[request.tensor].alias or request.tensor]
        boxed = true_values(spec, request.slot, slots[request.slot])[request.box.slices]
        assert_equal(values, boxed if request.flat is None else boxed.reshape(-1)[slice(*request.flat)])


def hugging_face(folder: Path) -> Path:
    """A plain folder, written by the safetensors library."""
    folder.mkdir()
    save_file({spec.name: true_values(spec, "weight", "F32") for spec in TABLE}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout | None], Path]:
    """A step saved at a layout, or the Hugging Face folder if there is none."""
    folder, made = tmp_path_factory.mktemp("shared"), dict[Layout | None, Path]()

    def get(layout: Layout | None) -> Path:
        if layout not in made:
            at = folder / str(len(made))
            made[layout] = save_step(at, TABLE, layout, SLOTS) if layout else hugging_face(at)
        return made[layout]

    return get


@pytest.mark.parametrize(
    ("source", "target", "apart"),
    [
        (Layout(), Layout(tp=4), 2.5),
        pytest.param(Layout(tp=4), Layout(tp=2), 1.0, marks=pytest.mark.matrix),
        (None, Layout(tp=4), 1.5),
        (Layout(dp=4, zero=3), Layout(tp=2), 1.5),
    ],
    ids=["1-to-4", "4-to-2", "hugging-face-to-4", "zero-3-to-2"],
)
def test_inference_ranks_read_the_weights_once(
    saved: Callable[[Layout | None], Path], source: Layout | None, target: Layout, apart: float
) -> None:
    """`apart`: the least that they read, by the size, if each reads for itself."""
    path, size = saved(source), target.world_size
    requests = [held(TABLE, target, rank) for rank in range(size)]
    with counted_reads() as reads:
        found = load_together(path, requests)
    for rank in range(size):
        check(requests[rank], found[rank], TABLE, SLOTS)
    assert LOGICAL <= reads.nbytes <= 1.02 * LOGICAL
    with counted_reads() as reads:
        for rank in range(size):
            load(path, requests[rank], shared_read.ALONE)
    assert reads.nbytes >= apart * LOGICAL


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout(dp=4, zero=1), Layout(tp=2, dp=2, zero=1)),
        pytest.param(Layout(tp=4), Layout(dp=2), marks=pytest.mark.matrix),
        pytest.param(*[Layout(tp=2, dp=2, zero=3)] * 2, marks=pytest.mark.matrix),
    ],
    ids=["zero-1-to-tp", "4-to-replicas", "as-stored"],
)
def test_training_ranks_read_every_slot_once(
    saved: Callable[[Layout | None], Path], source: Layout, target: Layout
) -> None:
    path, size = saved(source), target.world_size
    requests = [updated(TABLE, target, rank, SLOTS) for rank in range(size)]
    with counted_reads() as reads:
        found = load_together(path, requests)
    for rank in range(size):
        check(requests[rank], found[rank], TABLE, SLOTS)
    assert reads.nbytes <= 1.02 * 2 * LOGICAL


def test_three_boxes_of_one_tensor_are_read_once_by_one_rank(saved: Callable[[Layout | None], Path]) -> None:
    requests = [request for request in held(TABLE, Layout(tp=2), 0) if "c_attn" in request.tensor]
    assert len(requests) == 3
    with counted_reads() as reads:
        check(requests, load(saved(Layout()), requests, shared_read.ALONE), TABLE, SLOTS)
    assert reads.nbytes <= 1.02 * 4 * 256 * 3072


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks and many rounds in a small checkpoint."""
    for module in (chunk, chunk_blocks, read_plan):
        monkeypatch.setattr(module, "BLOCK", 512)
    for module in (read_plan, shared_read):
        monkeypatch.setattr(module, "AREA", 4096)


SOURCES = [
    pytest.param(Layout(), marks=pytest.mark.matrix),
    pytest.param(Layout(tp=4), marks=pytest.mark.matrix),
    Layout(tp=2, pp=2, dp=2, zero=2, bucket_size=2000),
    pytest.param(Layout(dp=4, zero=3), marks=pytest.mark.matrix),
]
TARGETS = [Layout(tp=8), Layout(pp=2, dp=2, zero=1), Layout(tp=2, dp=3, zero=3, sharding="dim0")]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_many_rounds_bring_every_rank_its_own(source: Layout, tmp_path: Path) -> None:
    table = mixed_table()
    path = save_step(tmp_path / "run", table, source, MIXED)
    for target in TARGETS:
        ranks = range(target.world_size)
        requests = [held(table, target, rank) + updated(table, target, rank, MIXED) for rank in ranks]
        for rank, found in zip(ranks, load_together(path, requests), strict=True):
            check(requests[rank], found, table, MIXED)


@pytest.mark.usefixtures("small_blocks")
def test_rounds_hold_each_block_once_and_fit_the_areas(tmp_path: Path) -> None:
    table = mixed_table()
    planner = ReadPlanner(Checkpoint.open(save_step(tmp_path / "run", table, Layout(tp=2, dp=2, zero=1), MIXED)))
    needs = [
        [span for request in updated(table, Layout(tp=4), rank, MIXED) for span in planner.spans(request)]
        for rank in range(4)
    ]
    union = planner.union(needs)
    assert sum(map(planner.nbytes, union)) == sum(c.nbytes for of in planner.checkpoint.chunks.values() for c in of)
    for num_ranks in (1, 3, 4):
        rounds = planner.assign_rounds(union, num_ranks)
        assert [read.span for reads in rounds for read in reads] == union, "in the order of the files"
        assert len(rounds) > 1
        for reads in rounds:
            places = sorted((read.rank, read.at, planner.nbytes(read.span)) for read in reads)
            assert all(at + nbytes <= 4096 and rank < num_ranks for rank, at, nbytes in places)
            for (rank, at, nbytes), after in pairwise(places):
                assert after[0] > rank or after[1] >= at + nbytes


def test_all_ranks_report_the_error_of_one(saved: Callable[[Layout | None], Path], tmp_path: Path) -> None:
    path = save_step(tmp_path / "run", TABLE, Layout(), {"weight": "F32"})
    where = next(iter(Checkpoint.open(path).chunks["model.layers.0.down_proj.weight", "weight"]))
    with (path / where.file).open("r+b") as file:
        file.seek(where.offset + 17 * 2**20)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    found = load_together(path, [held(TABLE, Layout(tp=4), rank) for rank in range(4)])
    assert len({str(error) for error in found}) == 1
    for error in found:
        assert isinstance(error, ShardCorrupt)
        assert f"{where.file}: block 1 of model.layers.0.down_proj.weight, slot weight" in str(error)


def test_a_disk_error_on_one_rank_ends_all(saved: Callable[[Layout | None], Path]) -> None:
    path, count = saved(Layout()), iter(range(10**6))

    def fail(name: str, operation: Callable[..., int], fd: int, buffer: memoryview, *where: int) -> int:
        if len(buffer) > 2**20 and next(count) == 5:
            raise OSError(5, "Input/output error")
        return operation(fd, buffer, *where)

    with watched(fail, ("pread",)):
        found = load_together(path, [held(TABLE, Layout(tp=4), rank) for rank in range(4)])
    for error in found:
        assert type(error) is StorageError
        assert "Input/output error" in str(error)


def test_where_memory_cannot_be_shared_each_reads_alone(
    saved: Callable[[Layout | None], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shared_read._map
    mapped = iter(range(10**6))

    def hidden(process_id: int, fd: int) -> memoryview:
        if next(mapped) == 3:
            raise PermissionError(13, "Permission denied")
        return real(process_id, fd)

    monkeypatch.setattr(shared_read, "_map", hidden)
    target = Layout(tp=2)
    requests = [held(TABLE, target, rank) for rank in range(2)]
    found = load_together(saved(Layout()), requests)
    for rank in range(2):
        check(requests[rank], found[rank], TABLE, SLOTS)


def test_shared_memory_is_bounded_and_has_no_name(saved: Callable[[Layout | None], Path]) -> None:
    seen = list[str]()

    def look(index: int, values: object) -> None:
        seen.extend(Path("/proc/self/maps").read_text().splitlines())

    target = Layout(tp=2)

    def rank(peers: Peers) -> None:
        read_all(Checkpoint.open(saved(Layout())), held(TABLE, target, peers.rank), look, peers)

    assert together(2, rank) == [None, None]
    areas = {line for line in seen if "memfd:tk-load (deleted)" in line}
    assert areas, "memory that has no name on any file system"
    low, high = (int(word, 16) for word in next(iter(areas)).split()[0].split("-"))
    assert high - low == 2 * AREA <= 64 * 2**20
    gc.collect()
    assert "tk-load" not in Path("/proc/self/maps").read_text()
