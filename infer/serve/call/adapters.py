"""The loading and unloading of adapters while requests run, for all protocols."""

import asyncio
from pathlib import Path

from ....core.errors import InvalidRequest
from ...engine.request.events import AdapterInfo
from .call import RequestRunner


async def load_adapter(runner: RequestRunner, name: str, path: Path) -> AdapterInfo:
    """Loads an adapter and gives it a name, which another adapter may have.

    If this is cancelled, the adapter may be loaded all the same.

    Raises:
        InvalidRequest: the name is that of the model.
        TkError: the server takes no requests; or see `EngineAdapters.load`.
    """
    runner.lifecycle.check_admitting()
    if name in runner.engine.info.names:
        raise InvalidRequest(f"name is {name!r}, which is the model's; give the adapter another one.", field="name")
    return await asyncio.to_thread(runner.engine.adapters.load, name, path)


async def unload_adapter(runner: RequestRunner, name: str) -> AdapterInfo:
    """Takes an adapter's name away, and returns when its last request has ended.

    Raises:
        UnknownAdapter: no loaded adapter has the name.
        Loading: the model is not loaded yet.
    """
    runner.lifecycle.check_loaded()
    info, unused = runner.engine.adapters.unload(name)
    await asyncio.wrap_future(unused)
    return info
