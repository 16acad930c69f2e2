"""The log of tk's libraries on standard error."""

import json
import logging
import warnings

import pytest

from tk.core.console_log import quieter, show_log, shown_form


def test_messages_are_plain_lines_and_come_once(capsys: pytest.CaptureFixture[str]) -> None:
    show_log()
    show_log()
    logging.getLogger("tk.train.saving.resume").info("resuming from %s", "step-00000004")
    logging.getLogger("tk.train.saving.resume").debug("a detail")
    logging.getLogger("another.library").info("a line of theirs")
    assert capsys.readouterr().err == "resuming from step-00000004\n"


@pytest.mark.parametrize("form", ["text", "quiet text", "json"])
def test_warnings_of_other_libraries_have_the_form_of_the_log(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_log(form)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("slow", UserWarning, stacklevel=1)
    said = capsys.readouterr().err
    show_log()
    words = f"UserWarning: slow ({__file__}:"
    if form == "json":
        assert json.loads(said)["message"].startswith(words)
    else:
        assert said.startswith(f"warning: {words}")


@pytest.mark.parametrize(
    ("form", "level"),
    [("quiet json", logging.WARNING), ("text", logging.INFO), ("verbose text", logging.DEBUG)],
)
def test_another_process_shows_the_same(form: str, level: int) -> None:
    show_log(form)
    assert shown_form() == form
    assert logging.getLogger("tk").level == level
    assert quieter(form).split() == ["quiet", *(word for word in form.split() if word not in ("quiet", "verbose"))]
    show_log()


def test_messages_are_json_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    show_log()
    show_log("json")
    log = logging.getLogger("tk.infer")
    log.info("listening on %s", "here")
    log.info("not shown", extra={"fields": {"status": "OK", "tokens": 3}})
    try:
        raise KeyError("x")
    except KeyError:
        log.exception("a fault")
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("info", "tk.infer", "listening on here")
    assert first["time"].endswith("+00:00")
    assert (second["status"], second["tokens"]) == ("OK", 3)
    assert "message" not in second
    assert "KeyError: 'x'" in third["traceback"]
    show_log()
    log.info("plain again")
    assert capsys.readouterr().err == "plain again\n"
