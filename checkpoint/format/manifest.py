"""The manifest: the metadata of a step. Its SHA-256, stored in COMMIT, is the checkpoint's identity."""

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, get_args

from ...core import dtypes
from ...core.errors import CheckpointError, ManifestError, ParallelError
from ...core.layout import Layout
from ...core.tensors import Split, TensorSpec
from . import json_strict as strict
from .adapter_record import KEYS as ADAPTER_KEYS
from .adapter_record import AdapterRecord
from .chunk import Part
from .safetensors_file import MAX_DIMS

FORMAT: Final = "tk"
VERSION: Final = 3  # the newest; see `_version`
MANIFEST: Final = "manifest.json"
COMMIT: Final = "COMMIT"
PARTS: Final = "parts"
MAX_MANIFEST: Final = 2**28  # bytes
MAX_PART: Final = 2**28  # bytes
_BYTES_PER_CHUNK: Final = 8  # bytes that a chunk adds to its part's list of tensors, at most

_LAYOUT_KEYS: Final = tuple(Layout().to_json())  # of every version
_NEW_LAYOUT_KEYS: Final = ("cp", "ep", "expert_tp")  # since version 2
_KEYS: Final = (
    "format", "version", "step", "layout", "tensors", "aliases", "param_groups", "resume", "files", "parts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A logical tensor: its shape, how tensor parallelism cuts it, its layer, and the dtype code of each slot."""

    shape: tuple[int, ...]
    slots: Mapping[str, str]
    split: Split | None = None
    layer: int | str = "first"

    @staticmethod
    def of(spec: TensorSpec) -> "StoredTensor":
        """Returns the record of a tensor whose slots are decided."""
        return StoredTensor(spec.shape, spec.slots, spec.split, spec.layer)

    def spec(self, name: str) -> TensorSpec:
        """Returns the tensor of a table of which this is the record."""
        states = {slot: code for slot, code in self.slots.items() if slot != "weight"}
        layer: Any = self.layer  # "first" or "last", if it is no number: `_tensor_from_json` has checked it
        return TensorSpec(name, self.shape, self.split, layer, dtype=self.slots["weight"], states=states)


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The size in bytes and the SHA-256 of a small file."""

    size: int
    sha256: str

    @staticmethod
    def of(data: bytes) -> "FileDigest":
        """Returns the digest of a file with that content."""
        return FileDigest(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class PartRecord:
    """The manifest's record of a part.

    Attributes:
        digest: the size and SHA-256 of the part's file.
        tensors: the tensors of which the part holds elements, as positions in the sorted list of all tensors' names, so
            that a reader of one tensor opens no other parts.
    """

    digest: FileDigest
    tensors: tuple[int, ...] = ()

    @staticmethod
    def of(data: bytes, part: Part, names: Collection[str]) -> "PartRecord":
        """Returns the record of a part with that content; `names` are the names of all tensors."""
        position = {name: index for index, name in enumerate(sorted(names))}
        return PartRecord(FileDigest.of(data), tuple(sorted({position[chunk.tensor] for chunk in part.chunks})))


@dataclass(frozen=True, slots=True)
class Manifest:
    """A step's metadata.

    Attributes:
        step: the training step.
        layout: the layout that saved the step; no reader needs it.
        tensors: the stored tensors by name.
        aliases: the name of each tied tensor -> the name of the stored tensor whose values it shares.
        param_groups: the optimizer's groups, each with "params", a list of tensor names.
        resume: the run's state from `train/`, independent of the layout.
        files: the side files (config.json and others) by name.
        parts: the records of the parts, by file name inside parts/.
        adapter: the record of the adapter whose tensors these are; None for a model.
    """

    step: int
    layout: Layout
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    param_groups: tuple[Mapping[str, Any], ...] = ()
    resume: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    parts: Mapping[str, PartRecord] = field(default_factory=dict)
    adapter: AdapterRecord | None = None

    def to_bytes(self) -> bytes:
        """Returns the content of manifest.json."""
        layout = self.layout.to_json()
        document = {
            "format": FORMAT,
            "version": 3 if self.adapter else _version(layout),
            "step": self.step,
            "layout": layout,
            "tensors": {name: _tensor_to_json(tensor) for name, tensor in self.tensors.items()},
            "aliases": dict(self.aliases),
            "param_groups": [dict(group) for group in self.param_groups],
            "resume": dict(self.resume),
            "files": {name: asdict(digest) for name, digest in self.files.items()},
            "parts": {name: asdict(part.digest) | {"tensors": part.tensors} for name, part in self.parts.items()},
            **(self.adapter.to_json() if self.adapter else {}),
        }
        return strict.dump(document)

    def check_size(self, num_chunks: int) -> None:
        """Raises ManifestError if readers would refuse this manifest once it lists the parts of that many chunks."""
        data = self.to_bytes()
        size = len(data) + _BYTES_PER_CHUNK * num_chunks
        if size > MAX_MANIFEST:
            raise ManifestError(
                f"The manifest of {len(self.tensors)} tensors would have some {size} bytes, and {MAX_MANIFEST} are "
                f"accepted; store fewer and larger tensors."
            )
        strict.check_counts(data, "the manifest to be written")

    @staticmethod
    def parse(data: bytes, what: str) -> "Manifest":
        """Reads a manifest.

        Args:
            data: the content of manifest.json.
            what: the file, for messages.

        Raises:
            ManifestError: the manifest breaks a rule.
            CheckpointError: a newer tk wrote it.
        """
        document = strict.mapping(strict.parse(data, what), what)
        found, version = document.get("format"), document.get("version")
        if found != FORMAT or not isinstance(version, int) or not 1 <= version <= VERSION:
            # A step of a newer tk may be whole, so it must not count as damaged: damaged steps are passed over.
            newer = found == FORMAT and isinstance(version, int) and version > VERSION
            raise (CheckpointError if newer else ManifestError)(
                f"{what} has format {str(found)[:40]!r}, version {str(version)[:40]}; this tk reads {FORMAT!r}, "
                f"versions 1 to {VERSION}{'. Read it with the tk that wrote it' if newer else ''}."
            )
        strict.members(document, what, _KEYS, ADAPTER_KEYS if version > 2 else ())
        tensors = {
            strict.tensor_name(name, f"{what}: tensors"): _tensor_from_json(value, f"{what}: {name}")
            for name, value in strict.mapping(document["tensors"], f"{what}: tensors").items()
        }
        return Manifest(
            step=strict.integer(document["step"], f"{what}: step"),
            layout=_layout(document["layout"], version, f"{what}: layout"),
            tensors=tensors,
            aliases=_aliases(document["aliases"], tensors, f"{what}: aliases"),
            param_groups=_groups(document["param_groups"], tensors, f"{what}: param_groups"),
            resume=strict.mapping(document["resume"], f"{what}: resume"),
            files=_digests(document["files"], f"{what}: files"),
            parts=_parts(document["parts"], len(tensors), f"{what}: parts"),
            adapter=AdapterRecord.from_json(document, what),
        )

    @property
    def table(self) -> tuple[TensorSpec, ...]:
        """Returns the stored tensors as a table for `core.ownership`, which suffices for any unsharded layout."""
        return tuple(tensor.spec(name) for name, tensor in self.tensors.items())


def _version(layout: Mapping[str, Any]) -> int:
    """Returns the oldest version whose readers understand a model's step with this layout."""
    return 2 if any(key in layout for key in _NEW_LAYOUT_KEYS) else 1


def _tensor_to_json(tensor: StoredTensor) -> dict[str, Any]:
    split = None if tensor.split is None else asdict(tensor.split)
    return {"shape": list(tensor.shape), "split": split, "layer": tensor.layer, "slots": dict(tensor.slots)}


def _tensor_from_json(value: Any, what: str) -> StoredTensor:
    found = strict.members(value, what, ("shape", "split", "layer", "slots"))
    shape = tuple(strict.integer(extent, f"{what}: shape") for extent in strict.array(found["shape"], f"{what}: shape"))
    if len(shape) > MAX_DIMS or math.prod(shape) > strict.MAX_INT:
        raise ManifestError(
            f"{what}: a shape of {len(shape)} dims and {math.prod(shape)} elements is refused; at most {MAX_DIMS} dims "
            f"and {strict.MAX_INT} elements are accepted."
        )
    layer = found["layer"]
    if layer not in ("first", "last"):
        strict.integer(layer, f"{what}: layer", 0, 2**20)
    slots = strict.mapping(found["slots"], f"{what}: slots")
    for slot, code in slots.items():
        strict.text(slot, f"{what}: slots", 64)
        dtypes.by_code(strict.text(code, f"{what}: slot {slot}", 16), f"{what}: slot {slot}")
    if "weight" not in slots:
        raise ManifestError(f"{what} has no slot 'weight'.")
    return StoredTensor(shape, slots, _split(found["split"], shape, f"{what}: split"), layer)


def _split(value: Any, shape: tuple[int, ...], what: str) -> Split | None:
    if value is None:
        return None
    found = strict.members(value, what, ("dim", "unit", "rule", "of"), ("sections",))
    dim = strict.integer(found["dim"], f"{what}: dim", 0, len(shape) - 1)
    unit = strict.integer(found["unit"], f"{what}: unit", 1)
    sections = strict.integer(found.get("sections", 1), f"{what}: sections", 1, 64)
    rule = found["rule"]
    rules = get_args(Split.__annotations__["rule"])
    if rule not in rules or shape[dim] % (unit * sections) or shape[dim] == 0:
        raise ManifestError(f"{what}: {found} cannot cut shape {list(shape)}; rules are {', '.join(rules)}.")
    return Split(dim, unit, rule, strict.text(found["of"], f"{what}: of"), sections)


def _layout(value: Any, version: int, what: str) -> Layout:
    found = strict.members(value, what, _LAYOUT_KEYS, _NEW_LAYOUT_KEYS if version > 1 else ())
    for key, number in found.items():
        if key != "sharding":
            strict.integer(number, f"{what}: {key}", 0, 2**40)
    if found["sharding"] not in ("flat", "dim0"):
        raise ManifestError(f"{what}: sharding must be flat or dim0.")
    try:
        return Layout(**found)
    except ParallelError as error:
        raise ManifestError(f"{what}: {error}") from error


def _aliases(value: Any, tensors: Mapping[str, StoredTensor], what: str) -> dict[str, str]:
    found = strict.mapping(value, what)
    for alias, name in found.items():
        if alias in tensors or not isinstance(name, str) or name not in tensors:
            raise ManifestError(f"{what}: {alias[:80]!r} must be no stored tensor and name one that is stored.")
        strict.text(alias, what)
    return found


def _groups(value: Any, tensors: Mapping[str, StoredTensor], what: str) -> tuple[dict[str, Any], ...]:
    groups = []
    for group in strict.array(value, what):
        params = strict.array(strict.mapping(group, what).get("params"), f"{what}: params")
        unknown = [name for name in params if not isinstance(name, str) or name not in tensors]
        if unknown:
            raise ManifestError(f"{what}: {str(unknown[0])[:80]!r} is no tensor of this checkpoint's manifest.")
        groups.append(group)
    return tuple(groups)


def _digests(value: Any, what: str) -> dict[str, FileDigest]:
    result = {}
    for name, item in strict.mapping(value, what).items():
        strict.file_path(name, what)
        found = strict.members(item, f"{what}: {name}", ("size", "sha256"))
        size = strict.integer(found["size"], f"{what}: {name}: size")
        result[name] = FileDigest(size, strict.digest(found["sha256"], f"{what}: {name}: sha256"))
    return result


def _parts(value: Any, num_tensors: int, what: str) -> dict[str, PartRecord]:
    result = {}
    for name, item in strict.mapping(value, what).items():
        strict.file_name(name, what)
        found = strict.members(item, f"{what}: {name}", ("size", "sha256", "tensors"))
        held = strict.array(found["tensors"], f"{what}: {name}: tensors")
        for index in held:
            strict.integer(index, f"{what}: {name}: tensors", 0, num_tensors - 1)
        size = strict.integer(found["size"], f"{what}: {name}: size")
        digest = FileDigest(size, strict.digest(found["sha256"], f"{what}: {name}: sha256"))
        result[name] = PartRecord(digest, tuple(held))
    return result
