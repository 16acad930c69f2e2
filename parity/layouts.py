"""The layouts of the comparison: the whole matrix, a covering subset of it, or the list in a file."""

import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ..core.config import parse
from ..core.errors import ConfigError, TkError
from .covering import covering_set
from .layout import ParityLayout
from .subject import Subject

COVERED_AXES: Final = 3  # the default set has every combination of values of so many axes
AXES: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "tp": (1, 2, 4),
        "pp": (1, 2, 4),
        "dp": (1, 2, 4),
        "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1"),
        "zero": (0, 1, 2, 3),
        "shard_size": (0, 1, 2),
        "sequence_parallel": (False, True),
        "recompute": ("none", "selective", "full"),
        "tied": (False, True),
        "kv_heads": ("heads", "fewer", "fewer than tp"),
        "foreign": (False, True),
    }
)
FOREIGN_AXES: Final = ("dp", "zero", "shard_size")  # the axes that `initialize` supports


@dataclass(frozen=True, slots=True)
class Matrix:
    """All combinations of the axes' values.

    Attributes:
        layouts: the combinations that can run, without those that repeat the program of another.
        left_out: the number of combinations left out, by reason.
    """

    layouts: tuple[ParityLayout, ...]
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def num_combinations(self) -> int:
        """The number of combinations, including those left out."""
        return len(self.layouts) + self.left_out.total()

    def covering(self) -> tuple[ParityLayout, ...]:
        """Returns a small subset of the layouts with every possible combination of values of three axes."""
        rows = [[getattr(layout, axis) for axis in AXES] for layout in self.layouts]
        chosen = covering_set(rows, COVERED_AXES, cost=lambda index: self.layouts[index].num_ranks)
        return tuple(self.layouts[index] for index in chosen)


def matrix(subject: Subject, num_ranks: int) -> Matrix:
    """Builds the matrix of the combinations that fit the subject and `num_ranks` processes.

    The axes that vary the model are left out for a user's own model.
    """
    layouts: list[ParityLayout] = []
    left_out: Counter[str] = Counter()
    for layout in _combinations(subject):
        reason = _equivalent(layout) or rejection(layout, subject, num_ranks)
        if reason:
            left_out[reason] += 1
        else:
            layouts.append(layout)
    return Matrix(tuple(layouts), left_out)


def _combinations(subject: Subject) -> Iterator[ParityLayout]:
    axes = dict(AXES) if subject.varies_model else dict(AXES) | {"tied": (None,), "kv_heads": (None,)}
    for values in product(*(axes | {"foreign": (False,)}).values()):
        chosen = dict(zip(axes, values, strict=True))
        if chosen["schedule"] == "interleaved":
            chosen["num_virtual_stages"] = 2
        yield ParityLayout.model_validate(chosen)
    if subject.varies_model:
        for values in product(*(AXES[axis] for axis in FOREIGN_AXES)):
            yield ParityLayout.model_validate(dict(zip(FOREIGN_AXES, values, strict=True)) | {"foreign": True})


def rejection(layout: ParityLayout, subject: Subject, num_ranks: int) -> str:
    """Returns the message of the check that rejects a layout; "" if the layout can run."""
    if layout.num_ranks > num_ranks:
        return f"tp x pp x dp is more than {num_ranks} ranks"
    try:
        subject.check(layout)
    except TkError as error:
        return str(error)
    return ""


def _equivalent(layout: ParityLayout) -> str:
    """Explains which other layout runs the same program; "" if none does."""
    if layout.sequence_parallel and layout.tp == 1:
        return "at tp = 1 sequence_parallel splits nothing: it equals the layout without it"
    if layout.zero == 1 and layout.dp == 1:
        return "at dp = 1 ZeRO stage 1 shards nothing: it equals stage 0"
    if layout.shard_size and layout.zero == 0:
        return "ZeRO stage 0 shards nothing: shard_size has no effect"
    if layout.shard_size == layout.dp:
        return "shard_size = dp shards over all of dp: it equals shard_size = 0"
    return ""


def read_layouts(path: Path, subject: Subject, num_ranks: int) -> tuple[ParityLayout, ...]:
    """Reads the layouts that a TOML or JSON file lists under "layouts"; `tk parity --json` prints a file like this.

    Raises:
        ConfigError: the file cannot be read or has an unknown key, or one of its layouts cannot run.
    """
    result = []
    for place, data in enumerate(_listed(path), start=1):
        where = f"{path}, layout {place}"
        if not isinstance(data, dict):
            raise ConfigError(f"{where}: {data!r} must be a table with keys like tp and zero.")
        layout = parse(data.get("layout", data), ParityLayout, where)
        reason = rejection(layout, subject, num_ranks)
        if reason:
            raise ConfigError(f"{where}: {reason}")
        result.append(layout)
    return tuple(dict.fromkeys(result))


def _listed(path: Path) -> Sequence[object]:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"Cannot read the file of layouts {path}: {error.strerror}.") from error
    except ValueError as error:
        language = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"The file of layouts {path} is not valid {language}: {error}.") from error
    layouts = data.get("layouts") if isinstance(data, dict) else None
    if not isinstance(layouts, list) or not layouts:
        raise ConfigError(f'{path} has no list "layouts": write [[layouts]] and keys like tp = 2 below it.')
    return layouts
