"""A client that loads and unloads the adapters of a server, for operators; it does not import torch."""

from ...proto.v1 import generation_pb2 as pb
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from ..engine.request.events import AdapterInfo
from .connection import BlockingConnection
from .outgoing import sendable
from .wire import adapter_from_wire


class AdapterClient(BlockingConnection):
    """A connection to the service Admin of a server, for its adapters; arguments: see `ServerConnection`.

    All methods need the role admin, and raise as those of `Client` do.
    """

    _service = pb_grpc.AdminStub

    def load(self, name: str, checkpoint: str) -> AdapterInfo:
        """Loads an adapter under a name, also one that another adapter has: requests that run end with theirs.

        Args:
            name: the name by which requests ask for it.
            checkpoint: the path, on the server's machine, of a step folder, a run folder or a folder of PEFT.
        """
        with sendable():
            request = pb.LoadAdapterRequest(name=name, checkpoint=checkpoint)
        return adapter_from_wire(self._call(self._stub.LoadAdapter, request))

    def unload(self, name: str) -> AdapterInfo:
        """Takes an adapter's name away, and returns when its last request has ended."""
        with sendable():
            request = pb.UnloadAdapterRequest(name=name)
        return adapter_from_wire(self._call(self._stub.UnloadAdapter, request))

    def loaded(self) -> list[AdapterInfo]:
        """Returns the adapters that requests may ask for."""
        return [
            adapter_from_wire(each) for each in self._call(self._stub.ListAdapters, pb.ListAdaptersRequest()).adapters
        ]
