"""The loaded adapters by their names, and the slots of the workers that they are in.

A name can be given to another adapter at any time. The one that it had before keeps its slot until the last request
that began with it has ended. So there is a slot more than names: that for the next adapter of a name.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from ....core.errors import Overloaded, UnknownAdapter
from ..request.adapter_lease import AdapterLease
from ..request.events import AdapterInfo
from .adapter_source import AdapterSource


def _running() -> "Future[None]":
    """Returns a future that who waits for it cannot cancel."""
    made = Future[None]()
    made.set_running_or_notify_cancel()
    return made


@dataclass(eq=False, slots=True)
class SlottedAdapter:
    """An adapter in a slot.

    Attributes:
        slot: its place in the backends.
        source: what was loaded.
        is_loaded: whether the workers have it.
        num_holders: the requests that use it, and one more as long as it has a name or is being loaded.
        unused: is done when it has lost its name and its last request has ended.
    """

    slot: int
    source: AdapterSource
    is_loaded: bool = False
    num_holders: int = 1
    unused: "Future[None]" = field(default_factory=_running)


@dataclass(slots=True)
class AdapterTable:
    """The adapters of an engine, for any thread.

    Attributes:
        max_named: how many adapters may have a name at the same time.
        max_heads, max_experts: how many of them may have a head of their own, and factors of experts.
        on_free: is called with each slot that no request uses any more; it must not block.
    """

    max_named: int
    max_heads: int = 0
    max_experts: int = 0
    on_free: Callable[[int], object] = lambda slot: None
    _named: dict[str, SlottedAdapter] = field(default_factory=dict)
    _slots: dict[int, SlottedAdapter] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def loaded(self) -> Mapping[str, AdapterSource]:
        """The adapters that requests may ask for, by name."""
        with self._lock:
            return {name: each.source for name, each in self._named.items()}

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The descriptions of these adapters."""
        with self._lock:
            return tuple(each.source.info(name, each.num_holders - 1) for name, each in self._named.items())

    @property
    def in_slots(self) -> Mapping[int, AdapterSource]:
        """All adapters that the workers have, those too that have lost their name and are used still."""
        with self._lock:
            return {slot: each.source for slot, each in self._slots.items() if each.is_loaded}

    def hold(self, name: str, version: AdapterLease | None = None) -> AdapterLease:
        """Returns a request's hold on the adapter of a name.

        Args:
            name: what a caller asks for.
            version: a hold on the adapter that it must be, which may have lost the name since; None = any.

        Raises:
            UnknownAdapter: no loaded adapter has the name.
            Overloaded: it is another one than `version`, which another table gave: other weights of the base came
                meanwhile.
        """
        with self._lock:
            found = self._of(version) or self._find(name)
            if version is not None and found.source.digest != version.digest:
                raise Overloaded(f"Adapter {name[:100]!r} was loaded again while the call began. Ask again.")
            found.num_holders += 1
            return AdapterLease(found.slot, found.source.digest, partial(self.drop, found), found)

    def reserve(self, name: str, source: AdapterSource) -> SlottedAdapter:
        """Takes a slot for an adapter that is to be loaded and to have a name; `give` or `drop` must follow.

        One thread at a time may load adapters.

        Raises:
            Overloaded: as many other adapters have names, or heads or experts, as may, or requests use some that have
                lost theirs.
        """
        with self._lock:
            self._check_room(name, source)
            if name not in self._named and len(self._named) >= self.max_named:
                raise Overloaded(
                    f"All {self.max_named} places for adapters are taken (loaded: {', '.join(self._named)}). Unload "
                    "one, give one of these names to the new one, or start with a larger max_adapters."
                )
            slot = next((slot for slot in range(self.max_named + 1) if slot not in self._slots), None)
            if slot is None:
                raise Overloaded(
                    f"There is no room for adapter {name!r}: requests still use {len(self._slots) - len(self._named)} "
                    "earlier ones, which have been unloaded or replaced. Try again when these requests have ended, or "
                    "start with a larger max_adapters."
                )
            self._slots[slot] = taken = SlottedAdapter(slot, source)
            return taken

    def give(self, name: str, adapter: SlottedAdapter) -> None:
        """Gives a name to an adapter that was loaded into its slot; the adapter that had it loses it."""
        with self._lock:
            before, self._named[name] = self._named.get(name), adapter
            if before is not None:
                self._drop(before)

    def remove(self, name: str) -> SlottedAdapter:
        """Takes a name away: later requests cannot ask for it. Returns the adapter that had it.

        Raises:
            UnknownAdapter: no loaded adapter has the name.
        """
        with self._lock:
            found = self._find(name)
            del self._named[name]
            self._drop(found)
            return found

    def drop(self, adapter: SlottedAdapter) -> None:
        """Ends one hold on an adapter, whose slot is free after the last."""
        with self._lock:
            self._drop(adapter)

    def _of(self, version: AdapterLease | None) -> SlottedAdapter | None:
        """Returns what a hold of this table holds; None for that of another one."""
        found = self._slots.get(version.slot) if version else None
        return found if version and found is version.held else None

    def _check_room(self, name: str, source: AdapterSource) -> None:
        """Checks that an adapter with a head or experts may get a name; there is room for one more than have names."""
        others = [each.source for other, each in self._named.items() if other != name]
        held = [each.source for each in self._slots.values()]
        for has, most, what, option in (
            (attrgetter("has_head"), self.max_heads, "a head of their own", "heads"),
            (attrgetter("has_experts"), self.max_experts, "experts", "experts"),
        ):
            if has(source) and (sum(map(has, others)) >= most or sum(map(has, held)) > most):
                raise Overloaded(
                    f"All {most} places for adapters with {what} are taken. Unload one and wait until its requests "
                    f"have ended, or start with a larger max_adapter_{option}."
                )

    def _find(self, name: str) -> SlottedAdapter:
        if name in self._named:
            return self._named[name]
        known = ", ".join(map(repr, self._named)) or "none"
        raise UnknownAdapter(
            f"Adapter {name[:100]!r} is not loaded; loaded are: {known}. Load it first, or name another."
        )

    def _drop(self, adapter: SlottedAdapter) -> None:
        adapter.num_holders -= 1
        if not adapter.num_holders:
            del self._slots[adapter.slot]
            if adapter.is_loaded:
                self.on_free(adapter.slot)
            adapter.unused.set_result(None)
