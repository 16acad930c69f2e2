"""Unexpected exceptions: a traceback in the log, and an error that names them; errors of tk pass as they are."""

import logging

import pytest

from tk.core.defects import known_or_defect
from tk.core.errors import ConfigError, WorkerDied


def test_a_defect_is_logged_with_its_traceback_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError) as seen:
        raise KeyError("lost")
    found = known_or_defect(seen.value, "The engine's thread", WorkerDied)
    assert isinstance(found, WorkerDied)
    assert "The engine's thread (process " in str(found)
    assert "failed by a defect of tk (KeyError). The log has its traceback." in str(found)
    assert "lost" not in str(found), "the text may hold what a caller has sent"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[1] is seen.value


def test_an_error_of_tk_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    error = ConfigError("wrong")
    assert known_or_defect(error, "The engine's thread") is error
    assert not caplog.records
