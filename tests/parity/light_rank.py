"""A rank of the pool without torch, that does as its job says: answers, fails, dies, or waits for ever."""

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

from tk.parity.rank_loop import Say, Work, serve


def work(job: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
    say({"step": 1})
    what = job["payload"]["do"] if job["rank"] == job["num_ranks"] - 1 else "answer"
    if what == "fail":
        raise ValueError("out of luck")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "wait":
        threading.Event().wait()
    return {"rank": job["rank"], "process": os.getpid(), "store": job["store"]}


def load() -> Work:
    return work


if __name__ == "__main__":
    serve(load)
