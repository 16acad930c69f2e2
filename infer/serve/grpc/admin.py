"""The service tk.v1.Admin, for operators: load, abort, drain, the cache, the weights, and the adapters."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from ....core.errors import InvalidRequest
from ....proto.v1 import generation_pb2 as pb
from ....proto.v1 import generation_pb2_grpc as pb_grpc
from ...client.wire import adapter_to_wire
from ..call.adapters import load_adapter, unload_adapter
from ..call.call import RequestRunner
from ..engine_protocol import Reloads
from ..errors import NotBuilt
from ..operations.lifecycle import ServerState
from .calls import GrpcCall

ADMINISTRATION: Final = pb.DESCRIPTOR.services_by_name["Admin"]


class AdminService(pb_grpc.AdminServicer):
    """The calls of tk.v1.Admin; callers of the role admin may make them.

    Args:
        runner: runs the requests of the server.
        drain: refuses new requests, and returns when the live ones have ended or so many seconds have passed.
        reloads: changes the weights of the engine; None = Reload answers UNIMPLEMENTED.
    """

    def __init__(
        self,
        runner: RequestRunner,
        drain: Callable[[float], Awaitable[None]],
        reloads: Reloads | None,
    ) -> None:
        self._runner, self._drain, self._reloads = runner, drain, reloads
        self._statistics = runner.engine.statistics

    async def GetLoad(self, request: pb.GetLoadRequest, call: GrpcCall) -> pb.Load:
        """Describes the load; proto/v1/generation.proto documents this call and those below."""
        state: ServerState = self._runner.lifecycle.state
        return pb.Load(state=pb.State.Value(f"STATE_{state.name}"), **asdict(self._statistics.load()))

    async def Abort(self, request: pb.AbortRequest, call: GrpcCall) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidRequest("request_id is empty; name the request to end.", field="request_id")
        return pb.AbortResponse(found=self._runner.abort(request.request_id, request.principal))

    async def Drain(self, request: pb.DrainRequest, call: GrpcCall) -> pb.DrainResponse:
        seconds = request.timeout_seconds
        if not 0 <= seconds < math.inf:
            raise InvalidRequest(
                f"timeout_seconds is {seconds}; it must be 0 seconds or more.", field="timeout_seconds"
            )
        await self._drain(seconds)
        return pb.DrainResponse(running=len(self._runner.live))

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, call: GrpcCall
    ) -> pb.FlushPrefixCacheResponse:
        return pb.FlushPrefixCacheResponse(blocks=await asyncio.to_thread(self._statistics.flush_prefix_cache))

    async def CheckCache(self, request: pb.CheckCacheRequest, call: GrpcCall) -> pb.CacheReport:
        return pb.CacheReport(**asdict(await asyncio.to_thread(self._statistics.check_cache)))

    async def Reload(self, request: pb.ReloadRequest, call: GrpcCall) -> pb.ReloadResponse:
        checkpoint = _path(request.checkpoint, "a step folder")
        self._runner.lifecycle.check_admitting()
        if self._reloads is None:
            raise NotBuilt("This server cannot change its weights; start another server.")
        info = await asyncio.to_thread(self._reloads.reload, checkpoint)
        return pb.ReloadResponse(step=info.step, manifest_sha256=info.manifest_sha256)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, call: GrpcCall) -> pb.Adapter:
        path = _path(request.checkpoint, "a step folder, a run folder or a folder of PEFT")
        return adapter_to_wire(await load_adapter(self._runner, request.name, path))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, call: GrpcCall) -> pb.Adapter:
        return adapter_to_wire(await unload_adapter(self._runner, request.name))

    async def ListAdapters(self, request: pb.ListAdaptersRequest, call: GrpcCall) -> pb.ListAdaptersResponse:
        self._runner.lifecycle.check_loaded()
        return pb.ListAdaptersResponse(adapters=map(adapter_to_wire, self._runner.engine.adapters.infos))


def _path(given: str, right: str) -> Path:
    """Returns the path in the field `checkpoint`; raises InvalidRequest if it is none."""
    if not given or "\0" in given:
        raise InvalidRequest(f"checkpoint is not a path; name {right}.", field="checkpoint")
    return Path(given)
