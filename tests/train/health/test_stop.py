"""Requests to stop: signals within a moment are one request."""

import os
import signal

from tk.train.health.stop import StopRequest


def test_two_signals_within_the_echo_time_are_one_request() -> None:
    stop = StopRequest(echo_seconds=60.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop.install()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)  # without the echo's time, the second would end this process
        assert stop.requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
