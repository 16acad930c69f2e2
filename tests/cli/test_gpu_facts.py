"""What `tk doctor` and `tk plan` say of a GPU that this machine need not have."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tk.cli import gpu_facts, gpu_option
from tk.cli.gpu_option import installed_torch
from tk.cli.plan import plan as plan_command
from tk.core.cuda import Gpu
from tk.tests.train.conftest import Configure

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))


def test_each_kind_of_gpu_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_facts, "read_gpus", lambda: (H100, H100))
    facts = {fact.name: fact.value for fact in gpu_facts.gpu_facts()}
    assert len(facts) == 5
    assert "compute capability 9.0" in facts["GPU features"]
    assert facts["attention, bf16"] == "whole rows by flash, documents by varlen, a window by varlen"
    assert facts["attention, fp32"] == "whole rows by efficient, documents by blocks, a window by blocks"
    assert facts["fp32 products"].startswith("in fp32")


def test_an_old_gpu_has_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_facts, "read_gpus", lambda: (Gpu("Tesla T4", (7, 5)),))
    facts = {fact.name: fact.value for fact in gpu_facts.gpu_facts()}
    assert facts["attention, bf16"].startswith("none")
    assert facts["attention, fp16"] == "whole rows by efficient, documents by blocks, a window by blocks"


def test_a_machine_without_gpus_has_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_facts, "read_gpus", lambda: ())
    assert list(gpu_facts.gpu_facts()) == []


@pytest.mark.parametrize(
    ("words", "here", "name"),
    [(["--gpu", "a40"], (), "A40"), (["--gpu", "12.0"], (), "a GPU of capability 12.0"), ([], (H100,), H100.name)],
)
def test_a_plan_names_the_kernels_of_the_given_gpu_or_of_this_machines(
    configure: Configure,
    write_toml: Any,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    here: tuple[Gpu, ...],
    name: str,
) -> None:
    monkeypatch.setattr(gpu_option, "read_gpus", lambda: here)
    path = write_toml(configure(precision={"params": "bf16"}))
    shown = CliRunner().invoke(plan_command, [str(path), "--json", *words])
    assert shown.exit_code == 0, shown.output
    gpu = json.loads(shown.stdout)["gpu"]
    assert gpu["name"] == name
    assert [each["kernel"] for each in gpu["attention"]] == ["flash"]
    assert f"{'gpu':<11}{name}" in CliRunner().invoke(plan_command, [str(path), *words]).stdout


def test_the_installed_torch_is_found_without_loading_it() -> None:
    assert installed_torch() >= (2, 11)
