"""The operations that bench_checkpoint.py times, each in a process of its own, which prints its costs as JSON.

The command line is the name of one of the functions below and its arguments.
"""

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.local_params import local_params

SHARDING_INFO = "DCP_SHARDING_INFO"  # the key under which DCP's Hugging Face writer stores a file's offsets


def tk_command(*words: str) -> None:
    """Runs a `tk` command."""
    from tk.cli.main import main

    if main([*words]):
        sys.exit(1)


def tk_load(source: str, tp: str, rank: str) -> None:
    """Loads every tensor and slot that a rank of tp holds into memory."""
    from tk.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(source)
    for name, slot, box in _boxes(checkpoint, int(tp), int(rank)):
        checkpoint.read(name, box, slot)


def tk_load_together(source: str, tp: str) -> None:
    """Runs `tk_load` on all ranks of tp at once, each in its process; together they read every block once."""
    pairs = [socket.socketpair() for _ in range(int(tp))]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "tk_load_rank", source, tp, str(rank), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
        )
        for rank, (_, theirs) in enumerate(pairs)
    ]
    hub = []
    for ours, theirs in pairs:
        theirs.close()
        hub.append(ours.makefile("rw", encoding="latin-1"))
        ours.close()
    while all(messages := [line.readline() for line in hub]):  # an all-gather: every rank receives all lines
        for line in hub:
            line.writelines(messages)
            line.flush()
    for line in hub:
        line.close()
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(1)


def tk_load_rank(source: str, tp: str, rank: str, connection: str) -> None:
    """Loads the tensors of one rank of `tk_load_together`."""
    from tk.checkpoint import Checkpoint
    from tk.checkpoint.read.read_plan import ReadRequest
    from tk.checkpoint.read.shared_read import Peers, read_all

    line = socket.socket(fileno=int(connection)).makefile("rw", encoding="latin-1")

    def gather(mine: bytes) -> list[bytes]:
        line.write(mine.decode("latin-1") + "\n")
        line.flush()
        return [line.readline()[:-1].encode("latin-1") for _ in range(int(tp))]

    checkpoint = Checkpoint.open(source)
    requests = [ReadRequest(name, box, slot) for name, slot, box in _boxes(checkpoint, int(tp), int(rank))]
    kept: dict[int, Any] = {}
    read_all(checkpoint, requests, kept.__setitem__, Peers(int(rank), int(tp), gather))


def safetensors_slices(source: str, tp: str, rank: str) -> None:
    """Loads the tensors of `tk_load` from a checkpoint at tp 1 by `safe_open().get_slice()`, without checksums."""
    from safetensors import safe_open

    from tk.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(source)
    files: dict[str, Any] = {}
    for name, slot, box in _boxes(checkpoint, int(tp), int(rank)):
        file = checkpoint.chunks[name, slot][0].file
        if file not in files:
            files[file] = safe_open(Path(source) / file, framework="pt")
        files[file].get_slice(name)[box.slices]


def dcp_consolidate(source: str, target: str) -> None:
    """Consolidates shards into whole tensors in safetensors, by DCP's own function."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    mapping = json.loads((Path(source) / "mapping.json").read_text())
    Path(target).mkdir()
    consolidate_safetensors_files(source, target, mapping, num_threads=2)


def dcp_load(source: str) -> None:
    """Loads a DCP checkpoint that four ranks saved, as whole tensors."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    shapes = json.loads((Path(source) / "shapes.json").read_text())
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    load(state, checkpoint_id=source, no_dist=True)


def make_consolidation_source(source: str, target: str) -> None:
    """Writes a tk checkpoint's boxes as the shards that DCP's Hugging Face writer makes, one file per rank."""
    from safetensors.torch import save_file

    from tk.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(source)
    folder, tp = Path(target), checkpoint.layout.tp
    folder.mkdir()
    for rank in range(tp):
        tensors, offsets = {}, {}
        for name, slot, box in _boxes(checkpoint, tp, rank):
            if rank == 0 or checkpoint.tensors[name].split:
                tensors[f"{name}@{slot}"] = checkpoint.read(name, box, slot).torch()
                offsets[f"{name}@{slot}"] = {"saved_offsets": list(box.offset)}
        file = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(tensors, file, {SHARDING_INFO: json.dumps(offsets), "DCP_VERSION": "1.0"})
    names = {f"{name}@{slot}": 1 for name, slot in checkpoint.chunks}
    (folder / "mapping.json").write_text(json.dumps(names))


def make_dcp_source(source: str, target: str) -> None:
    """Saves a tk checkpoint's tensors by DCP from four ranks, split as tk splits them."""
    from torch.multiprocessing.spawn import spawn

    spawn(_dcp_rank, (source, target), nprocs=4)


def _dcp_rank(rank: int, source: str, target: str) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from tk.checkpoint import Checkpoint

    dist.init_process_group("gloo", init_method=f"file://{target}.store", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    checkpoint = Checkpoint.open(source)
    state = {}
    for name, slot, box in _boxes(checkpoint, 4, rank):
        split = checkpoint.tensors[name].split
        placement = Shard(split.dim) if split else Replicate()
        local = checkpoint.read(name, box, slot).torch()
        state[f"{name}@{slot}"] = DTensor.from_local(local, mesh, [placement])
    save(state, checkpoint_id=target)
    if rank == 0:
        shapes = {f"{n}@{s}": list(checkpoint.tensors[n].shape) for n, s in checkpoint.chunks}
        (Path(target) / "shapes.json").write_text(json.dumps(shapes))
    dist.destroy_process_group()


def _boxes(checkpoint: Any, tp: int, rank: int) -> list[tuple[str, str, Box]]:
    pieces = [piece for param in local_params(checkpoint.manifest.table, Layout(tp=tp), rank) for piece in param.pieces]
    return [(p.tensor.name, slot, p.box) for p in pieces for slot in checkpoint.tensors[p.tensor.name].slots]


def main() -> None:
    """Runs one of the functions above and prints its costs as the last line of stdout."""
    functions: dict[str, Callable[..., None]] = {
        f.__name__: f
        for f in (
            tk_command,
            tk_load,
            tk_load_together,
            tk_load_rank,
            safetensors_slices,
            dcp_consolidate,
            dcp_load,
            make_consolidation_source,
            make_dcp_source,
        )
    }
    functions[sys.argv[1]](*sys.argv[2:])
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    peak = max(int(status["VmHWM"].split()[0]), children)
    cost = {"peak_mib": peak / 2**10, "read": int(io["rchar"]), "written": int(io["wchar"])}
    print(json.dumps(cost))


if __name__ == "__main__":
    main()
