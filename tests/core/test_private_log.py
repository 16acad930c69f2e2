"""Processes that fail in every way on words that they must not show."""

import subprocess
import sys

import pytest

FAILING = """
import asyncio, gc, logging, os, sys, threading, warnings
from tk.core.background_log import background_log
from tk.core.console_log import show_log, shown_form

SECRET = "a se" + "cret"

class Finalized:
    def __del__(self):
        raise ValueError(SECRET)

def fail():
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        raise ExceptionGroup(SECRET, [OSError(SECRET), ValueError(SECRET)]) from error

async def forget():
    asyncio.get_running_loop().create_task(raise_later())
    asyncio.get_running_loop().call_soon(lambda words: 1 / 0, SECRET)
    await asyncio.sleep(0.01)
    gc.collect()

async def raise_later():
    raise RuntimeError(SECRET)

def all_ways():
    log = logging.getLogger("tk.infer")
    try:
        fail()
    except ExceptionGroup:
        log.exception("a fault of ours")
    logging.getLogger("others").error("theirs has %s", SECRET)
    logging.getLogger("others").error(SECRET, exc_info=ValueError(SECRET))
    warnings.warn(SECRET, RuntimeWarning)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    Finalized()
    asyncio.run(forget())
    log.info("the format is %s, gRPC prints %s", shown_form(), os.environ["GRPC_VERBOSITY"])

how = sys.argv[1:]
if "background" in how:
    with background_log(f"private {how[0]}"):
        all_ways()
else:
    show_log(f"private {how[0]}")
    all_ways()
fail()
"""


@pytest.mark.parametrize("how", [("text",), ("json",), ("text", "background"), ("json", "background")])
def test_no_way_of_failing_shows_a_secret(how: tuple[str, ...]) -> None:
    ended = subprocess.run([sys.executable, "-c", FAILING, *how], capture_output=True, text=True, timeout=60)
    shown = ended.stdout + ended.stderr
    assert ended.returncode == 1
    assert "secret" not in shown, shown
    for name in ("KeyError", "ExceptionGroup", "OSError", "RuntimeWarning", "RuntimeError", "ZeroDivisionError"):
        assert name in shown, shown
    for words in ("a fault of ours", "A thread ended.", "An exception was ignored.", "The process ended.", "in fail"):
        assert words in shown, shown
    assert f"the format is private {how[0]}, gRPC prints NONE" in shown
