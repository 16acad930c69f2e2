"""Vectors of 16 floats on any machine."""

import pytest

from tk.infer.engine.kernels.native import prepare
from tk.infer.engine.kernels.native.binding import library
from tk.tests.infer.engine.kernels.native.products import MODELS, portable


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a unit with vectors of 16 floats: the code of AVX-512 without its instructions."""
    monkeypatch.setattr(library, "SOURCE", portable())
    monkeypatch.setattr(prepare, "instruction_sets", lambda: ("baseline", "wide"))
    return "wide"


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of kernels that run on models of their instructions."""
    monkeypatch.setattr(library, "SOURCE", portable())
    monkeypatch.setattr(prepare, "instruction_sets", lambda: ("baseline", "wide", *MODELS))
    return str(request.param)
