"""The process that made an object: calls in another one, and copies, are refused by the object's name."""

import copy
import os

import pytest

from tk.core.errors import ConfigError
from tk.core.home_process import HomeProcess


def test_another_process_is_refused_by_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = os.getpid()
    home = HomeProcess("This thing")
    home.require()
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with pytest.raises(ConfigError, match=rf"This thing was made in process {made} and is used in process 7"):
        home.require()
    assert not home.is_here


def test_what_holds_it_cannot_be_copied() -> None:
    with pytest.raises(ConfigError, match="This thing cannot be copied or sent to another process"):
        copy.deepcopy({"home": HomeProcess("This thing")})
