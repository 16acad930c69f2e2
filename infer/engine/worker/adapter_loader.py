"""A worker's loader: a thread that reads and packs adapters while the worker computes steps.

It has a socket of its own to the engine: a rank that decodes ahead reads and writes the other one in C. What it has
packed waits until the engine lets the worker put it into its slot, between two steps, which is quick.

The thread has no lower priority: on a full machine it would hold Python's lock for as long as others kept it from its
core, and steps would wait for it (measured: up to 2 s). It holds the lock for short times only, and mostly computes
without it.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from ....core.defects import known_or_defect
from ....core.errors import WorkerDied, pack
from ..step.channel import Frame, receive, send
from .adapter_order import AdapterOrder

Put = Callable[[], object]  # puts a packed adapter into its slot


class AdapterLoader:
    """The loader; `put` is for the worker's own thread.

    Args:
        connection: its socket to the engine, which it closes.
        pack_adapter: reads and packs an adapter, and returns what puts it into its slot.
    """

    def __init__(self, connection: socket.socket, pack_adapter: Callable[[AdapterOrder], Put]) -> None:
        self._connection, self._pack_adapter = connection, pack_adapter
        self._packed: dict[int, Put] = {}  # by the numbers of their orders
        self._thread = threading.Thread(target=self._run, name="tk-adapters")
        self._thread.start()

    def put(self, number: int) -> None:
        """Puts the adapter of an order, which is packed, into its slot; no step is computed meanwhile."""
        self._packed.pop(number)()

    def close(self) -> None:
        """Ends the thread; the order that it carries out ends first."""
        with suppress(OSError):  # the engine has ended
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        with suppress(WorkerDied):  # the engine has ended
            while (frame := receive(self._connection)) is not None:
                number, order = frame.values["number"], frame.values.get("order")
                if order is None:
                    self._packed.pop(number, None)
                else:
                    send(self._connection, self._carry_out(number, AdapterOrder(**order)))

    def _carry_out(self, number: int, order: AdapterOrder) -> Frame:
        try:
            self._packed[number] = self._pack_adapter(order)
        except Exception as error:  # whatever it is, the worker goes on with the adapters that it has
            return Frame("refused", {"number": number, "error": pack(known_or_defect(error, "A loader of adapters"))})
        return Frame("packed", {"number": number})
