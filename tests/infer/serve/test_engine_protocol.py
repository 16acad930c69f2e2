"""The interfaces of an engine are those of the engine, of the switch between two, and of the scripted one of tests."""

import inspect

import pytest

from tk.infer.engine.engine import Engine
from tk.infer.engine.engine_adapters import EngineAdapters
from tk.infer.engine.schedule.statistics import EngineStatistics
from tk.infer.serve.engine_protocol import AdaptersProtocol, EngineProtocol, Reloads, StatisticsProtocol
from tk.infer.serve.operations.merged_statistics import MergedStatistics
from tk.infer.serve.operations.model_switch import ModelSwitch
from tk.tests.infer.serve.fake_engine import FakeAdapters, FakeBooks, FakeEngine


@pytest.mark.parametrize(
    ("protocol", "kinds"),
    [
        (EngineProtocol, (Engine, ModelSwitch, FakeEngine)),
        (StatisticsProtocol, (EngineStatistics, MergedStatistics, FakeBooks)),
        (AdaptersProtocol, (EngineAdapters, FakeAdapters)),
        (Reloads, (ModelSwitch,)),
    ],
)
def test_methods_have_the_parameters_of_the_protocol(protocol: type, kinds: tuple[type, ...]) -> None:
    for name, method in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_"):
            wanted = list(inspect.signature(method).parameters)
            for kind in kinds:
                assert list(inspect.signature(getattr(kind, name)).parameters) == wanted, f"{kind.__name__}.{name}"
