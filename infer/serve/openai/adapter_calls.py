"""The calls /v1/load_lora_adapter and /v1/unload_lora_adapter, with the fields and answers that vLLM has for them."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....core.errors import InvalidRequest
from ..call.adapters import load_adapter, unload_adapter
from ..call.call import RequestRunner, ServerCall
from ..http.connection import HttpConnection
from ..http.framing import HttpRequest
from ..http.json_body import Fields, parsed
from ..http.problems import HttpProblem


class AdapterCalls:
    """Answers both calls.

    Args:
        runner: runs the requests of the server.
        root: the folder below which adapters may be loaded; None = none may.
    """

    def __init__(self, runner: RequestRunner, root: Path | None) -> None:
        self._runner, self._root = runner, root

    async def load(self, request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        """Loads an adapter; one that has the name already is replaced only with `load_inplace`."""
        if self._root is None:
            raise HttpProblem(
                "This server loads no adapters over HTTP: it was started without --adapter-root DIR, the folder below "
                "which they may be.",
                403,
            )
        name, path, in_place = await parsed(request.body, _read_load)
        folder = await asyncio.to_thread(folder_below, self._root, path)
        if not in_place and any(each.name == name for each in self._runner.engine.adapters.infos):
            raise InvalidRequest(
                f"The lora adapter {name!r} has already been loaded. To give its name to other bytes, set load_inplace "
                "to true.",
                field="lora_name",
            )
        try:
            await load_adapter(self._runner, name, folder)
        except InvalidRequest as error:
            raise error.renamed("lora_name") from error
        await _succeed(reply, name, "added")

    async def unload(self, request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        """Takes an adapter's name away, and answers when its last request has ended."""
        name = await parsed(request.body, _read_unload)
        await unload_adapter(self._runner, name)
        await _succeed(reply, name, "removed")


async def _succeed(reply: HttpConnection, name: str, what: str) -> None:
    text = f"Success: LoRA adapter '{name}' {what} successfully."
    await reply.whole(200, "text/plain; charset=utf-8", text.encode())


def _read_load(body: dict[str, Any]) -> tuple[str, str, bool]:
    fields = Fields(body)
    found = _required(fields, "lora_name"), _required(fields, "lora_path"), fields.flag("load_inplace")
    fields.refuse_rest()
    return found


def _read_unload(body: dict[str, Any]) -> str:
    fields = Fields(body)
    name = _required(fields, "lora_name")
    fields.integer("lora_int_id")  # vLLM's own number of the adapter, which it does not use here either
    fields.refuse_rest()
    return name


def _required(fields: Fields, name: str) -> str:
    value = fields.text(name)
    if not value or "\0" in value:
        raise fields.wrong(name, value, "a name" if name == "lora_name" else "a path")
    return value


def folder_below(root: Path, given: str) -> Path:
    """Returns the folder of a path that a caller gave, without links.

    Args:
        root: the folder that it must be below.
        given: an absolute path, or one that begins at `root`.

    Raises:
        InvalidRequest: it, or a link in it, leads out of `root`.
    """
    top = os.path.realpath(root)
    folder = os.path.realpath(os.path.join(top, given))
    if not _is_below(top, folder) or not all(_is_below(top, os.path.realpath(each)) for each in _within(folder)):
        raise InvalidRequest(
            "lora_path leads out of the folder that adapters are loaded from (--adapter-root). Copy the adapter there.",
            field="lora_path",
        )
    return Path(folder)


def _within(folder: str) -> Iterator[str]:
    """Yields the paths of all that is in a folder."""
    for at, folders, files in os.walk(folder):
        yield from (os.path.join(at, name) for name in (*folders, *files))


def _is_below(top: str, path: str) -> bool:
    return path.startswith(os.path.join(top, ""))
