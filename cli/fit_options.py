"""The options of `tk plan` about memory, machines and their rates."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click

from ..core.cuda import count_gpus
from ..core.machine_memory import machine_memory
from ..train.planning.fit import MemoryLimit
from ..train.planning.machines import Machines
from .common import ByteSize

_RATES: Final = re.compile(r"(\d+(?:\.\d+)?)(?::(\d+(?:\.\d+)?))?")
_MEGABYTE: Final = 1e6
_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class FitOptions:
    """The options, as they are given; None or 0 leaves a choice to tk."""

    fit: int | None
    device: str | None
    host_memory: int | None
    hosts: int
    link_rate: float | None
    disk_rate: tuple[float, float] | None

    @property
    def given(self) -> bool:
        """Whether the command has any of them."""
        return self != FitOptions(None, None, None, 1, None, None)

    @property
    def machines(self) -> Machines:
        """The machines of the run."""
        return Machines(self.hosts, self.link_rate, self.disk_rate)

    @property
    def limit(self) -> MemoryLimit | None:
        """The memory into which the run must fit; None if any will do."""
        if self.fit is None:
            return None
        on_gpu = self.device == "cuda" if self.device else count_gpus() > 0
        return MemoryLimit(self.fit, self.host_memory or machine_memory(), on_gpu)


class _Rate(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """The type of a number of MB/s, which the command receives in bytes per second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = _RATES.fullmatch(str(value))
        if match is None or match[2] or not float(match[1]):
            self.fail(f"{value!r} is no rate: write MB/s, as in 25000.", param, ctx)
        return float(match[1]) * _MEGABYTE


class _Rates(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """The type of READ:WRITE, or of one number for both, in MB/s, which the command receives in bytes per second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        match = _RATES.fullmatch(str(value))
        rates = (float(match[1]), float(match[2] or match[1])) if match else (0.0, 0.0)
        if not all(rates):
            self.fail(f"{value!r} is no rate: write MB/s, as in 2400, or READ:WRITE, as in 2400:1100.", param, ctx)
        return rates[0] * _MEGABYTE, rates[1] * _MEGABYTE


def fit_options(command: _Command) -> _Command:
    """Adds --fit, --device, --host-memory, --hosts, --link-rate and --disk-rate to a command."""
    for add in reversed(
        (
            click.option("--fit", type=ByteSize(), help="Find the least offload with which a rank takes at most SIZE."),
            click.option(
                "--device", type=click.Choice(("cpu", "cuda")), help="Of the ranks, for --fit; default: auto."
            ),
            click.option("--host-memory", type=ByteSize(), help="Of a host, beside GPUs; default: this machine's."),
            click.option(
                "--hosts", metavar="N", type=click.IntRange(1), default=1, help="Machines of the run; default: 1."
            ),
            click.option("--link-rate", type=_Rate(), metavar="MB/S", help="Between a GPU and the host."),
            click.option(
                "--disk-rate",
                type=_Rates(),
                metavar="READ:WRITE",
                help="Of a host's disk, in MB/s; tk doctor --disk measures it.",
            ),
        )
    ):
        command = add(command)
    return command
