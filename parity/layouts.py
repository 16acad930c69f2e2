"""The layouts that are compared with one process, as plain data: the whole matrix, what covers it, or a file's list."""

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

COVERED_AT_ONCE: Final = 3  # axes whose values all meet in the default set


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
FOREIGN_AXES: Final = ("dp", "zero", "shard_size")  # all that `initialize` knows of them


@dataclass(frozen=True, slots=True)
class Matrix:
    """Combinations of the axes' values.

    Attributes:
        layouts: those that can run, each another program.
        left_out: reason -> how many combinations are left out for it.
    """

    layouts: tuple[ParityLayout, ...]
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def num_combinations(self) -> int:
        """All of them."""
        return len(self.layouts) + self.left_out.total()

    def covering(self) -> tuple[ParityLayout, ...]:
        """The layouts of a small choice in which every three axes' values meet that can meet."""
        rows = [[getattr(layout, axis) for axis in AXES] for layout in self.layouts]
        chosen = covering_set(rows, COVERED_AT_ONCE, cost=lambda index: self.layouts[index].num_ranks)
        return tuple(self.layouts[index] for index in chosen)


def matrix(subject: Subject, num_ranks: int) -> Matrix:
    """Every combination that fits the subject and `num_ranks` processes; a user's own model stays as it is."""
    layouts: list[ParityLayout] = []
    left_out: Counter[str] = Counter()
    for layout in _combinations(subject):
        reason = _same_as(layout) or why_not(layout, subject, num_ranks)
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


def why_not(layout: ParityLayout, subject: Subject, num_ranks: int) -> str:
    """Why a layout cannot run, in the words of whichever check refuses it; "" if it can."""
    if layout.num_ranks > num_ranks:
        return f"tp x pp x dp is more than {num_ranks} ranks"
    try:
        subject.check(layout)
    except TkError as error:
        return str(error)
    return ""


def _same_as(layout: ParityLayout) -> str:
    """Which other layout is the very same program; "" if there is none."""
    if layout.sequence_parallel and layout.tp == 1:
        return "at tp = 1 sequence_parallel splits nothing: the same as without"
    if layout.zero == 1 and layout.dp == 1:
        return "at dp = 1 ZeRO stage 1 shards nothing: the same as stage 0"
    if layout.shard_size and layout.zero == 0:
        return "ZeRO stage 0 shards nothing: shard_size changes nothing"
    if layout.shard_size == layout.dp:
        return "shard_size = dp spreads a copy over all of dp: the same as 0"
    return ""


def read_layouts(path: Path, subject: Subject, num_ranks: int) -> tuple[ParityLayout, ...]:
    """The layouts that a TOML or JSON file lists under "layouts"; what `tk parity --json` prints is such a file.

    Raises:
        ConfigError: it cannot be read, has an unknown key, or a layout of it cannot run.
    """
    result = []
    for place, data in enumerate(_listed(path), start=1):
        where = f"{path}, layout {place}"
        if not isinstance(data, dict):
            raise ConfigError(f"{where}: {data!r} must be a table of keys such as tp and zero.")
        layout = parse(data.get("layout", data), ParityLayout, where)
        reason = why_not(layout, subject, num_ranks)
        if reason:
            raise ConfigError(f"{where}: {reason}")
        result.append(layout)
    return tuple(dict.fromkeys(result))


def _listed(path: Path) -> Sequence[object]:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"Cannot read the layouts {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is neither TOML nor, named *.json, JSON: {error}.") from error
    layouts = data.get("layouts") if isinstance(data, dict) else None
    if not isinstance(layouts, list) or not layouts:
        raise ConfigError(f'{path} has no list "layouts": write [[layouts]] and keys such as tp = 2 below it.')
    return layouts
