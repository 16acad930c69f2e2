"""The end of a call at its deadline, whatever it waits for."""

import asyncio
import time

import pytest

from tk.core.errors import DeadlinePassed
from tk.infer.serve.call.call import ended_by


def test_what_waits_for_ever_ends_and_what_was_opened_is_closed() -> None:
    closed: list[str] = []

    async def run() -> None:
        try:
            async with ended_by(time.monotonic() + 0.01):
                try:
                    await asyncio.Event().wait()
                finally:
                    closed.append("inner")
        finally:
            closed.append("outer")

    with pytest.raises(DeadlinePassed, match="deadline passed"):
        asyncio.run(run())
    assert closed == ["inner", "outer"]


@pytest.mark.parametrize("deadline", [None, 1e9])
def test_what_ends_before_has_its_result_and_its_errors(deadline: float | None) -> None:
    async def run(error: Exception | None) -> str:
        async with ended_by(deadline):
            await asyncio.sleep(0)
            if error is not None:
                raise error
        return "done"

    assert asyncio.run(run(None)) == "done"
    for error in (TimeoutError("of a connection"), ValueError("x")):
        with pytest.raises(type(error), match=str(error)):
            asyncio.run(run(error))


def test_a_cancelled_call_stays_cancelled() -> None:
    async def run() -> None:
        async def wait() -> None:
            async with ended_by(1e9):
                await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()

    asyncio.run(run())


def test_a_deadline_that_has_passed_ends_the_first_wait() -> None:
    async def run() -> None:
        async with ended_by(0.0):
            await asyncio.Event().wait()

    with pytest.raises(DeadlinePassed):
        asyncio.run(run())
