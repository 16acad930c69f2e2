"""Makes an object of the inference API and prints what becomes of it in other processes: NAME, and a folder or address.

python -m tk.tests.infer.engine.process_bound LLM FOLDER
"""

import asyncio
import os
import sys
from typing import Any

from tk.infer import LLM, AsyncClient, AsyncLLM, Client, SamplingParams
from tk.tests.other_processes import print_outcomes

SHORT = SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
PROMPTS = [[1, 2, 3]]


def use(subject: Any) -> None:
    """Completes a prompt."""
    answer = subject.generate(PROMPTS, SHORT)
    (completion,) = answer if isinstance(answer, list) else LOOP.run_until_complete(answer)
    assert len(completion.token_ids) == 2


def use_stream(llm: LLM) -> None:
    """Goes on with an iterator that the first use began."""
    next(STREAMS.setdefault(id(llm), llm.stream(PROMPTS[0], SamplingParams(max_new_tokens=500, ignore_eos=True))))


def close(subject: Any) -> None:
    """Closes it, whether it is asynchronous or not."""
    answer = subject.close()
    if answer is not None:
        LOOP.run_until_complete(answer)


LOOP = asyncio.new_event_loop()
STREAMS: dict[int, Any] = {}


def main(name: str, place: str) -> None:
    asyncio.set_event_loop(LOOP)  # of an AsyncClient
    if name in ("Client", "AsyncClient"):
        made: Any = (Client if name == "Client" else AsyncClient)(place, timeout=8)
    else:
        os.chdir(os.path.dirname(place))
        relative = os.path.basename(place)
        made = (AsyncLLM if name == "AsyncLLM" else LLM)(relative, kv_blocks=16, threads=1, max_restarts=1)
        if name == "AsyncLLM":
            LOOP.run_until_complete(made.start())
    how = use_stream if name == "LLM.stream" else use
    how(made)
    print_outcomes(made, how, close)


if __name__ == "__main__":
    main(*sys.argv[1:])
