"""The load of a running server, by Admin.GetLoad."""

from typing import Any

from ...proto.v1 import generation_pb2 as pb
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from .connection import BlockingConnection


class LoadReader(BlockingConnection):
    """A connection to the service Admin of a server; the arguments are those of `ServerConnection`."""

    _service = pb_grpc.AdminStub

    def read(self) -> dict[str, Any]:
        """Returns the fields of the message Load by name; `state` is a word in lower case, as "serving".

        Raises:
            TkError: the server does not answer, or refuses; see `error_from_rpc`.
        """
        load = self._call(self._stub.GetLoad, pb.GetLoadRequest())
        fields = {field.name: getattr(load, field.name) for field in load.DESCRIPTOR.fields}
        known = pb.State.DESCRIPTOR.values_by_number.get(load.state)
        state = f"state {load.state}" if known is None else known.name.removeprefix("STATE_").lower()
        return fields | {"state": state}
