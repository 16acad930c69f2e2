"""Mistakes with checkpoints: `tk inspect`, `tk verify`, `tk diff`, `tk reshard` and `tk export`."""

import json
import shutil
from pathlib import Path
from typing import Final

from tk.tests.cli.mistakes.mistake import Mistake, Prepare

_POINTER: Final = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"


def _copy(name: str, source: str = "models/base", *, without: str = "", **files: str | bytes) -> Prepare:
    """Returns what copies a checkpoint, with some of its files changed; names have __ for a dot."""

    def prepare(world: Path) -> None:
        shutil.copytree(world / source, world / name)
        if without:
            (world / name / without).unlink()
        for key, data in files.items():
            path = world / name / key.replace("__", ".")
            path.write_bytes(data if isinstance(data, bytes) else data.encode())

    return prepare


def _corrupt(world: Path) -> None:
    """Breaks the JSON of a header."""
    _copy("models/corrupt")(world)
    path = world / "models" / "corrupt" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:12] = b"\xff\xfe\xfd\xfc"
    path.write_bytes(data)


def _cut(world: Path) -> None:
    """Leaves a step as a save does that was killed."""
    _copy("runs/cut", "runs/demo", without="step-00000002/COMMIT")(world)


def _flip(world: Path) -> None:
    """Changes a bit of the last tensor of a run's step."""
    _copy("runs/flipped", "runs/demo")(world)
    path = world / "runs" / "flipped" / "step-00000002" / "model-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)


def _half(world: Path) -> None:
    """Leaves the first of two weight files."""
    tensors = {"model.embed_tokens.weight": 1, "lm_head.weight": 2}
    weight_map = {name: f"model-0000{number}-of-00002.safetensors" for name, number in tensors.items()}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    _copy("models/half", model__safetensors__index__json=index)(world)
    folder = world / "models" / "half"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


OF_CHECKPOINTS: Final[dict[str, Mistake]] = {
    "a path with a typo": Mistake(
        "inspect runs/dmeo", 3, "does not exist", "runs/dmeo", "did you mean runs/demo", "does-not-exist"
    ),
    "a model of the hub": Mistake(
        "inspect meta-llama/Llama-3.2-1B", 3, "does not exist", "meta-llama", "hf download", "does-not-exist"
    ),
    "a file of a checkpoint": Mistake(
        "inspect models/base/model.safetensors",
        3,
        "is one safetensors file",
        r"base/model\.safetensors",
        "name its folder",
        "holds-no-checkpoint",
    ),
    "tokens for a checkpoint": Mistake(
        "export tokens made", 3, "token folder", "tokens", r"\[data\] sources", "holds-no-checkpoint"
    ),
    "a clone without Git LFS": Mistake(
        "inspect models/pointer",
        3,
        "Git LFS pointer",
        r"pointer/model\.safetensors",
        "git lfs pull",
        "git-lfs-pointer",
        prepare=_copy("models/pointer", model__safetensors=_POINTER),
    ),
    "a corrupt header": Mistake(
        "inspect models/corrupt",
        3,
        "header",
        r"corrupt/model\.safetensors",
        "copy or download it again",
        "its-header",
        prepare=_corrupt,
    ),
    "a half download": Mistake(
        "verify models/half",
        3,
        "is missing",
        r"half/model-00002-of-00002\.safetensors",
        "download the whole checkpoint again",
        "is-missing",
        prepare=_half,
    ),
    "a pickle": Mistake(
        "reshard models/pickled made --tp 1",
        3,
        "PyTorch pickles",
        r"models/pickled.*pytorch_model\.bin",
        "save_pretrained",
        "pytorch-pickles",
        prepare=_copy("models/pickled", without="model.safetensors", pytorch_model__bin=b"PK\x03\x04"),
    ),
    "a step that no save finished": Mistake(
        "reshard runs/cut made --tp 2",
        3,
        "never finished",
        "step-00000002 has no COMMIT",
        "use another step",
        "has-no-usable-step",
        prepare=_cut,
    ),
    "a run without a step": Mistake(
        "generate runs/young hello",
        3,
        "has saved no step yet",
        "runs/young",
        "wait for",
        "has-no-usable-step",
        files={"runs/young/metrics.jsonl": "{}"},
    ),
    "a flipped bit": Mistake(
        "verify runs/flipped",
        3,
        "does not match its checksum",
        r"model-00000\.safetensors: block 0 of model\.norm\.weight",
        "from a backup, or use another step",
        "does-not-match-its-checksum",
        prepare=_flip,
    ),
    "no target layout": Mistake("reshard runs/demo made", 2, "missing option", "--tp", "--help", "missing-option"),
    "a target layout that does not fit": Mistake(
        "reshard runs/demo made --tp 3",
        2,
        "does not fit",
        r"q_proj.*num_attention_heads",
        "fits tp = 1 or 2 or 4",
        "does-not-fit",
    ),
    "a target that is there already": Mistake(
        "export runs/demo models/base", 2, "exists", "models/base", "name another folder.*--force", "exists-already"
    ),
    "a full disk": Mistake(
        "reshard runs/demo /proc/made --tp 1", 1, "0 B are free", "/proc/made", "free some space", "disk-is-full"
    ),
    "a merge of a model": Mistake(
        "export runs/demo made --merge",
        3,
        "holds a model, not an adapter",
        "runs/demo",
        "name the folder of an adapter",
        "not-an-adapter",
    ),
    "one checkpoint to compare": Mistake(
        "diff runs/demo", 2, "missing argument", "'B'", "tk diff --help", "missing-option"
    ),
}
