"""This machine's CPU as /proc/cpuinfo describes it: its model and its instruction sets, without running cpuid."""

import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

_AVX512: Final = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
# The instruction sets that kernels are written for, and the features of /proc/cpuinfo that each consists of.
INSTRUCTION_SETS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "avx2": frozenset({"avx2", "fma", "f16c"}),
        "avx512": _AVX512,
        "avx512_bf16": _AVX512 | {"avx512_bf16", "avx512_vnni"},
        "avx512_vnni": _AVX512 | {"avx512_vnni"},
        "amx": _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
        "asimd": frozenset({"asimd"}),
    }
)


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU.

    Attributes:
        model: the model's name; the machine's type ("aarch64") if the system does not name the model.
        features: the names of features as /proc/cpuinfo spells them, for example "avx512_bf16" or "asimd".
    """

    model: str
    features: frozenset[str]

    @property
    def instruction_sets(self) -> tuple[str, ...]:
        """The names in `INSTRUCTION_SETS` that this CPU has completely.

        The operating system lists a feature only if it saves its registers; AMX also needs the system's permission,
        which a process asks for by `arch_prctl`.
        """
        return tuple(name for name, needed in INSTRUCTION_SETS.items() if needed <= self.features)

    def lacks(self, flags: Iterable[str]) -> tuple[str, ...]:
        """Returns the features that code compiled with these flags may use and that this CPU does not have.

        A flag `-mNAME` stands for the feature of that name, in which a compiler writes no "_" ("-mavx512bf16",
        "-mamx-tile"). Other flags, for example `-mtune=NAME` or `-O2`, stand for no feature.
        """
        known = {_plain(feature) for feature in self.features}
        names = [flag.removeprefix("-m") for flag in flags if flag.startswith("-m") and "=" not in flag]
        return tuple(name for name in names if not name.startswith("no-") and _plain(name) not in known)


def read_cpu(path: Path = Path("/proc/cpuinfo")) -> Cpu:
    """Reads the first CPU of `path`; a file that cannot be read gives a CPU without features."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    features = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return Cpu(model[1].strip() if model else platform.machine(), frozenset(features[1].split() if features else ()))


def _plain(name: str) -> str:
    """Returns a feature's name without the punctuation that compilers and the system write differently."""
    return re.sub(r"[-_.]", "", name)
