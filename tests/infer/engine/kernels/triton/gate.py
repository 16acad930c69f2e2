"""Compiles every launch of the gate's cases for GPUs that are not here, and measures what each kernel takes of them.

A process of its own runs it for one version of Triton, because kernels are compiled only where TRITON_INTERPRET is not
set: `python -m tk.tests.infer.engine.kernels.triton.gate`. It prints one JSON object per kernel, its constants and GPU.
A case calls launch functions with tensors on torch's "meta" device; each launch is compiled exactly as Triton would do
it on the GPU, and not run. Add the cases of further kernels to `main`.
"""

import ast
import gc
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from tk.infer.engine.kernels.triton import append
from tk.tests.infer.engine.kernels.triton import attention_cases, row_cases
from tk.tests.infer.engine.kernels.triton.gate_case import GateCase

MOST_REGISTERS: Final = 255
MOST_SHARED: Final = 99 * 1024  # bytes: the least that a card of these capabilities has for one block
PACKAGE: Final = Path(append.__file__).parent
CUOBJDUMP: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

_PRODUCTS: Final = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a compiled kernel takes of a GPU.

    Attributes:
        case, kernel: the names of the case and the kernel.
        constants: its constexprs, warps and stages.
        capability: the GPU's, times ten.
        registers: those of a thread.
        stack: the bytes of a thread's stack: what did not fit into registers.
        shared: the bytes of shared memory of a block.
        products: the instructions of tensor cores that it has, in the order of their names, as PTX writes them.
    """

    case: str
    kernel: str
    constants: str
    capability: int
    registers: int
    stack: int
    shared: int
    products: str = ""

    @property
    def fits(self) -> bool:
        """Whether it stays within the limits of the gate."""
        return not self.stack and self.registers <= MOST_REGISTERS and self.shared <= MOST_SHARED


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: Any
    args: tuple[Any, ...]
    options: Mapping[str, Any]


def footprints(cases: Mapping[str, GateCase]) -> Iterator[Footprint]:
    """Compiles the launches of cases; equal ones once."""
    done = set[tuple[int, str]]()
    for name, case in cases.items():
        for launch in _launches(case):
            for capability in case.capabilities:
                source, options = _source(launch, GPUTarget("cuda", capability, 32))
                key = (capability, source.hash() + str(sorted(launch.options.items())))
                if key not in done:
                    done.add(key)
                    yield _compiled(name, source, options, capability)


def _launches(case: GateCase) -> list[_Launch]:
    found: list[_Launch] = []

    def run(self: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        if not case.kernels or self.__name__ in case.kernels:
            found.append(_Launch(self, args, options))

    with patch.object(JITFunction, "run", run):
        case.launch()
    return found


def _source(launch: _Launch, target: Any) -> tuple[Any, Any]:
    """Returns the source of a launch as `JITFunction.run` makes it, and its options."""
    kernel, backend = launch.kernel, make_backend(target)
    given = {**launch.options, "debug": False}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.args, **given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes), options


def _compiled(case: str, source: Any, options: Any, capability: int) -> Footprint:
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options.__dict__)
    names = source.fn.arg_names
    constants = {names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}
    shown = " ".join(f"{name}={value}" for name, value in constants.items())
    usage = _usage(made.asm["cubin"])
    return Footprint(
        case,
        source.fn.__name__,
        f"{shown} warps={options.num_warps} stages={options.num_stages}",
        capability,
        usage["REG"],
        usage["STACK"],
        made.metadata.shared,
        " ".join(sorted(set(_PRODUCTS.findall(made.asm["ptx"])))),
    )


def _usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", said)}


def kernels_of_the_package() -> set[str]:
    """Returns the functions of Triton in the package that no other calls: those that are launched."""
    defined, called = set[str](), set[str]()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                defined.add(node.name)
                inner = (each for each in ast.walk(node) if isinstance(each, ast.Call))
                called |= {each.func.id for each in inner if isinstance(each.func, ast.Name)}
    return defined - called


def main() -> None:
    """Prints the footprint of every case's kernels."""
    gc.disable()  # a compilation makes many objects and little garbage: to look for it takes 7 % of the time for 20 MB
    for each in footprints({**attention_cases.CASES, **row_cases.CASES}):
        print(json.dumps(asdict(each)), flush=True)


if __name__ == "__main__":
    main()
