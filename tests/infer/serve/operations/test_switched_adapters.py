"""Adapters while the weights of their base change: none comes or goes, and none is lost."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tk.core.errors import UnknownAdapter
from tk.infer.engine.request.events import AdapterInfo
from tk.infer.serve.errors import Loading
from tk.infer.serve.operations.switched_adapters import SwitchedAdapters
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeAdapters


class SlowAdapters(FakeAdapters):
    """Loads an adapter when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_end = threading.Event(), threading.Event()

    def load(self, name: str, path: Path) -> AdapterInfo:
        self.began.set()
        assert self.may_end.wait(WAIT_SECONDS)
        return super().load(name, path)


def test_adapters_are_those_of_the_current_engine_and_do_not_change_in_a_still_time() -> None:
    engines = [FakeAdapters()]
    adapters = SwitchedAdapters(lambda: engines[-1:])
    adapters.load("a", Path("/one"))
    with adapters.still():
        for change in (lambda: adapters.load("b", Path("/two")), lambda: adapters.unload("a")):
            with pytest.raises(Loading, match="Other weights of the base are being loaded"):
                change()
        assert [each.name for each in adapters.infos] == ["a"]
        engines.append(FakeAdapters())
    assert adapters.infos == ()
    adapters.load("b", Path("/two"))
    info, unused = adapters.unload("b")
    assert (info.name, unused.done(), engines[0].infos[0].name) == ("b", True, "a")


def test_a_still_time_begins_when_what_is_being_loaded_is() -> None:
    slow = SlowAdapters()
    adapters = SwitchedAdapters(lambda: [slow])

    def names() -> list[str]:
        with adapters.still():
            return [each.name for each in adapters.infos]

    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(adapters.load, "a", Path("/one"))
        assert slow.began.wait(WAIT_SECONDS)
        seen = threads.submit(names)
        slow.may_end.set()
        assert seen.result(WAIT_SECONDS) == ["a"]
        assert loading.result(WAIT_SECONDS).name == "a"


def test_an_unloaded_adapter_is_gone_when_the_requests_of_the_old_engine_have_ended_too() -> None:
    current, old = FakeAdapters(), FakeAdapters()
    adapters = SwitchedAdapters(lambda: [current, old])
    for engine in (current, old):
        engine.load("a", Path("/one"))
    current.load("b", Path("/two"))
    leases = [engine.table.hold("a") for engine in (old, current)]
    info, unused = adapters.unload("a")
    assert (info.name, current.infos[0].name, old.infos) == ("a", "b", ())
    for lease in leases:
        assert not unused.done()
        assert not unused.cancel(), "a caller that leaves ends no other's wait"
        lease.release()
    assert unused.done()
    assert adapters.unload("b")[1].done(), "the old engine never had it"
    with pytest.raises(UnknownAdapter, match="'a' is not loaded"):
        adapters.unload("a")
