"""The CPU as /proc/cpuinfo describes it."""

from pathlib import Path

from tk.core.cpu import INSTRUCTION_SETS, Cpu, read_cpu

SAPPHIRE_RAPIDS = """processor	: 0
model name	: Intel(R) Xeon(R) Platinum 8488C
flags		: sse4_1 avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8

processor	: 1
model name	: another
flags		: sse4_1
"""
GRAVITON = """processor	: 0
BogoMIPS	: 2100.00
Features	: fp asimd bf16
"""


def cpu_of(tmp_path: Path, text: str) -> Cpu:
    (tmp_path / "cpuinfo").write_text(text)
    return read_cpu(tmp_path / "cpuinfo")


def test_an_x86_cpu_has_the_sets_of_its_flags(tmp_path: Path) -> None:
    cpu = cpu_of(tmp_path, SAPPHIRE_RAPIDS)
    assert cpu.model == "Intel(R) Xeon(R) Platinum 8488C"
    assert set(cpu.instruction_sets) == set(INSTRUCTION_SETS) - {"asimd"}


def test_a_set_needs_all_of_its_features(tmp_path: Path) -> None:
    cpu = cpu_of(tmp_path, SAPPHIRE_RAPIDS.replace(" avx512dq", "").replace(" f16c", ""))
    assert cpu.instruction_sets == ()


def test_an_arm_cpu_has_features_and_the_machine_for_a_name(tmp_path: Path) -> None:
    cpu = cpu_of(tmp_path, GRAVITON)
    assert cpu.instruction_sets == ("asimd",)
    assert cpu.model


def test_a_system_without_the_file_has_a_cpu_without_features(tmp_path: Path) -> None:
    assert read_cpu(tmp_path / "missing").features == frozenset()


def test_flags_of_a_compiler_stand_for_features(tmp_path: Path) -> None:
    cpu = cpu_of(tmp_path, SAPPHIRE_RAPIDS)
    here = ("-mavx2", "-mf16c", "-msse4.1", "-mavx512bf16", "-mamx-tile", "-mtune=native", "-mno-avx", "-O2", "-DX")
    assert cpu.lacks(here) == ()
    assert cpu.lacks(("-mavx512fp16", "-mavx2")) == ("avx512fp16",)
