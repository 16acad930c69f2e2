"""The option that names a GPU which this machine need not have."""

import importlib.metadata
import re
from typing import Any, Final

import click

from ..core.cuda import Gpu, read_gpus
from ..core.extras import release_of
from ..core.gpu_cards import CARDS

_CAPABILITY: Final = re.compile(r"(\d+)\.(\d)")


class GpuType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """The type of a card's name, as in H100, or of a compute capability, as in 9.0."""

    name = "card"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Gpu:
        """Returns the GPU."""
        text = str(value).strip()
        if match := _CAPABILITY.fullmatch(text):
            return Gpu(f"a GPU of capability {text}", (int(match[1]), int(match[2])))
        for card in CARDS:
            if card.name.casefold() == text.casefold():
                return Gpu(card.name, card.capability)
        known = ", ".join(card.name for card in CARDS)
        self.fail(f"{value!r} is no known card: give its compute capability, as in 9.0, or one of {known}.", param, ctx)


def planned_gpu(given: Gpu | None) -> Gpu | None:
    """Returns the GPU that a plan is for: the given one, or this machine's first; None without either."""
    return given or next(iter(read_gpus()), None)


def installed_torch() -> tuple[int, int]:
    """Returns major and minor number of the installed torch, without loading it; (0, 0) without one."""
    try:
        return release_of(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return (0, 0)
