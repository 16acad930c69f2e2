"""The gate: every kernel compiles for GPUs that are not here, with the oldest and the newest Triton, within its limits.

Two processes compile, one per version. Triton's cache in .build/triton keeps what they have made.
"""

import json
import os
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tk.infer.engine.kv_formats import KV_DTYPES
from tk.scripts.triton_versions import TRITON, VERSIONS
from tk.tests.infer.engine.kernels.triton.gate import Footprint, kernels_of_the_package
from tk.tests.infer.engine.kernels.triton.gate_case import CAPABILITIES
from tk.tests.infer.engine.kernels.triton.where import ON_GPU

pytestmark = [
    pytest.mark.triton,
    pytest.mark.slow,
    pytest.mark.skipif(ON_GPU, reason="for machines without a GPU: see `make triton`"),
]
ROOT = Path(__file__).resolve().parents[5]
BF16_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
FORMATS = set(KV_DTYPES) - {"fp16"}  # it has the kernels of bf16
PAGED = ("rotate_and_append_kernel", "attention_kernel")
MOST_SECONDS = 120  # of a core, for each version


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _gate(version: str) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(TRITON / version), str(ROOT / ".build")]),
        "TRITON_CACHE_DIR": str(TRITON / "cache" / version),
    }
    command = [sys.executable, "-m", "tk.tests.infer.engine.kernels.triton.gate"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(900)
def test_every_kernel_compiles_within_its_limits() -> None:
    before = _seconds_of_children()
    gates = {version: _gate(version) for version in VERSIONS}
    found: dict[str, list[Footprint]] = {}
    for version, gate in gates.items():
        output, errors = gate.communicate()
        assert gate.returncode == 0, f"Triton {version}: {errors[-3000:]}"
        found[version] = [Footprint(**json.loads(line)) for line in output.splitlines()]
    assert (_seconds_of_children() - before) / len(VERSIONS) <= MOST_SECONDS, "it must stay short on two cores"
    for version, footprints in found.items():
        compiled = {(each.kernel, each.capability) for each in footprints}
        assert compiled == set(product(kernels_of_the_package(), CAPABILITIES))
        paged = {(each.case.partition(",")[0], each.kernel, each.capability) for each in footprints}
        assert set(product(FORMATS, PAGED, CAPABILITIES)) <= paged
        assert [f"Triton {version}: {each}" for each in footprints if not each.fits] == []
        # Tiles of any size take one instruction: with the order of columns it fixes the bits of `--batch-invariant`.
        for case, expected in (("fixed products", [BF16_PRODUCT]), ("fixed products, fp32", [""])):
            fixed = [each for each in footprints if each.case == case and each.kernel == "fixed_product_kernel"]
            assert sorted({each.products for each in fixed}) == expected, "for few rows, for many, and on every card"
        narrow = [each for each in footprints if each.case.startswith("int4") and each.kernel == "attention_kernel"]
        assert {each.products for each in narrow} == {BF16_PRODUCT}, "else every case of int4 is to name all GPUs"


def test_what_does_not_fit_is_refused() -> None:
    fine = Footprint("case", "kernel", "", 80, registers=255, stack=0, shared=99 * 1024)
    assert fine.fits
    assert not Footprint("case", "kernel", "", 80, registers=255, stack=8, shared=0).fits
    assert not Footprint("case", "kernel", "", 80, registers=256, stack=0, shared=0).fits
    assert not Footprint("case", "kernel", "", 80, registers=255, stack=0, shared=99 * 1024 + 1).fits
