"""`AdapterClient` and `Client` with adapters, against a real server over a scripted engine."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tk.core.errors import DeadlinePassed, InvalidRequest, Overloaded
from tk.infer.client import connection
from tk.infer.client.adapters import AdapterClient
from tk.infer.client.client import Client
from tk.infer.client.connection import RemoteError
from tk.infer.engine.request.events import AdapterInfo, Done, Started
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread, delta, finished, started

ONE = AdapterInfo("a", "sha256 of one", rank=8, bytes=1024, step=5)


@pytest.fixture
def admin(server: ServerThread) -> Iterator[AdapterClient]:
    with AdapterClient(server.target, timeout=20, max_attempts=1) as admin:
        yield admin


@pytest.fixture
def client(server: ServerThread) -> Iterator[Client]:
    with Client(server.target, timeout=20, max_attempts=1) as client:
        yield client


def test_adapters_are_loaded_listed_and_unloaded(admin: AdapterClient) -> None:
    assert admin.loaded() == []
    assert admin.load("a", "/one") == ONE
    assert admin.load("b", "/two").sha256 == "sha256 of two"
    assert admin.load("b", "/three").sha256 == "sha256 of three", "under a name in use"
    assert [(each.name, each.sha256) for each in admin.loaded()] == [("a", ONE.sha256), ("b", "sha256 of three")]
    assert admin.unload("a") == ONE
    assert [each.name for each in admin.loaded()] == ["b"]
    with pytest.raises(RemoteError, match=r"'a' is not loaded; loaded are: 'b'. Load it first, .* \(NOT_FOUND\)"):
        admin.unload("a")


def test_a_load_that_is_refused_changes_nothing(admin: AdapterClient, engine: FakeEngine) -> None:
    admin.load("a", "/one")
    with pytest.raises(RemoteError, match=r"missing does not exist. \(FAILED_PRECONDITION\)"):
        admin.load("a", "/missing")
    for name, path, field in (("fake", "/one", "name"), ("", "/one", ""), ("b", "", "checkpoint")):
        with pytest.raises(InvalidRequest) as caught:
            admin.load(name, path)
        assert caught.value.field == field
    for name in ("b", "c"):
        admin.load(name, "/two")
    with pytest.raises(Overloaded, match="All 3 places for adapters are taken"):
        admin.load("d", "/four")
    assert [each.name for each in admin.loaded()] == ["a", "b", "c"]


def test_requests_and_scores_name_their_adapter_and_answers_its_bytes(
    admin: AdapterClient, client: Client, engine: FakeEngine
) -> None:
    with pytest.raises(RemoteError, match=r"'a' is not loaded; loaded are: none. Load it first, .* \(NOT_FOUND\)"):
        client.generate("hi", adapter="a")
    admin.load("a", "/one")
    [with_it], [without] = client.generate(["hi"], adapter="a"), client.generate(["hi"])
    assert (with_it.adapter_sha256, without.adapter_sha256) == (ONE.sha256, "")
    begin, *_ = client.events("hi", adapter="a")
    assert isinstance(begin, Started)
    assert begin.adapter_sha256 == ONE.sha256
    assert "".join(each.text for each in client.stream("hi", adapter="a")) == "abc"
    assert [each.adapter for each in engine.requests] == ["a", "", "a", "a"]
    with pytest.raises(RemoteError, match="'b' is not loaded"):
        client.score("a", "b", adapter="b")


def test_unloading_waits_for_the_last_request_and_has_the_deadline_of_its_call(
    server: ServerThread, client: Client, admin: AdapterClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECONDS", 0.01)
    engine.script = lambda request: [started(request)]
    admin.load("a", "/one")
    events = client.events("hi", adapter="a")
    next(events)
    assert [each.live_requests for each in admin.loaded()] == [1]
    timeout = 0.2  # which may pass before the server has the call: then a longer one follows
    while admin.loaded():
        with AdapterClient(server.target, timeout=timeout) as hurried, pytest.raises(DeadlinePassed):
            hurried.unload("a")
        timeout *= 4
    admin.load("a", "/one")
    other = client.events("hi", adapter="a")
    next(other)
    threads = ThreadPoolExecutor(1)
    unloading = threads.submit(admin.unload, "a")
    while engine.adapters.infos:
        pass
    assert not unloading.done()
    for request in engine.requests:
        engine.emit(request.key, delta("abc"), finished(), Done())
    assert [list(each)[-1] for each in (events, other)] == [finished(), finished()]
    assert unloading.result(20) == ONE
    threads.shutdown()
    assert engine.adapters.table.in_slots == {}


def test_an_adapter_is_named_by_its_path_alone(admin: AdapterClient, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        admin.load("a", str(tmp_path / "\ud800"))
