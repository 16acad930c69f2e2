"""Errors on their way from one process to another."""

import inspect
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from tk.core.errors import InvalidRequest, RequestError, TkError, pack, unpack
from tk.tests.house.conftest import ROOT, package_files

SAMPLES = {
    "field": "top_p",
    "retry_after": 2.5,
    "status": "NOT_FOUND",
    "number": 28,
    "subject": "queue",
    "headers": [["allow", "GET"]],
    "given": "twelve words",
}  # by parameter


def classes() -> list[type[TkError]]:
    """Returns every TkError that the package declares, found in its source."""
    declared = {
        (path, name): set(re.findall(r"\w+", bases))
        for path in package_files()
        for name, bases in re.findall(r"^class (\w+)\(([^)]*)\)", (ROOT / path).read_text(), re.MULTILINE)
    }
    known: dict[str, Path] = {"TkError": Path("core/errors.py")}
    while new := {name: path for (path, name), bases in declared.items() if bases & known.keys() and name not in known}:
        known |= new
    return [getattr(import_module(".".join(["tk", *path.with_suffix("").parts])), name) for name, path in known.items()]


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_error_survives_the_way_with_its_attributes(kind: type[TkError]) -> None:
    parameters = list(inspect.signature(kind).parameters)[1:] if "__init__" in _defined(kind) else []
    error = kind("it is wrong", **{name: SAMPLES[name] for name in parameters})
    found = unpack(json.loads(json.dumps(pack(error))))
    assert type(found) is kind
    assert str(found) == "it is wrong"
    assert vars(found) == vars(error)
    assert getattr(found, "errno", None) == getattr(error, "errno", None)
    assert (found.exit_code, found.grpc_status) == (error.exit_code, error.grpc_status)


def test_the_tree_is_read_as_a_whole() -> None:
    names = {kind.__name__ for kind in classes()}
    assert {"StorageError", "PromptTooLong", "ShardCorrupt", "Draining", "Unavailable"} <= names


def test_a_class_that_is_not_loaded_here_becomes_its_nearest_base() -> None:
    data = pack(RequestError("no")) | {"classes": ["NeverHeardOf", "RequestError", "TkError"], "attributes": {"a": 1}}
    found = unpack(data)
    assert type(found) is RequestError
    assert (str(found), vars(found)) == ("no", {"a": 1})


def test_a_traceback_that_hangs_on_an_error_is_not_its_attribute() -> None:
    error = TkError("no")
    error.add_note("where it came from")
    assert pack(error)["attributes"] == {}


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_the_log_has_no_word_of_a_message(kind: type[TkError]) -> None:
    parameters = list(inspect.signature(kind).parameters)[1:] if "__init__" in _defined(kind) else []
    error = kind("a secret", **{name: SAMPLES[name] for name in parameters})
    assert error.log_form.startswith(kind.__name__)
    assert "secret" not in error.log_form


def test_an_error_keeps_type_and_length_of_a_value_alone() -> None:
    kinds = [InvalidRequest("wrong", "n", given).kind for given in ("secret", ["a", "b"], {"secret": 1}, 7, True, None)]
    assert kinds == ["str of 6", "list of 2", "dict of 1", "int", "bool", ""]
    assert "secret" not in repr(vars(InvalidRequest("wrong", "n", "secret")))


def _defined(kind: type[TkError]) -> set[str]:
    return {name for base in kind.__mro__ if issubclass(base, TkError) for name in vars(base)}


def test_a_renamed_error_has_the_other_name_where_it_named_its_field() -> None:
    for text, renamed in (
        ("stop is 7; use stop_token_ids.", "stopping.stop is 7; use stop_token_ids."),
        ("stop_it is 7.", "stop_it is 7."),
        ("Too long. The field is stop: lower it.", "Too long. The field is stopping.stop: lower it."),
        ("Do not stop.", "Do not stop."),
    ):
        error = InvalidRequest(text, field="stop", given="x")
        other = error.renamed("stopping.stop")
        assert (str(other), other.field, other.kind) == (renamed, "stopping.stop", error.kind)
        assert (str(error), error.field) == (text, "stop")
    assert str(InvalidRequest("No field.").renamed("x")) == "No field."
