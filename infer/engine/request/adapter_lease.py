"""A request's hold on its adapter, from its submission to its end."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class AdapterLease:
    """A hold on an adapter, which stays loaded until it ends.

    Attributes:
        slot: the adapter's place in the backends.
        digest: the SHA-256 of its configuration and tensors.
        held: what is held, by which the table that gave the hold knows it again.

    Args:
        on_release: is called when the hold ends.
    """

    slot: int
    digest: str
    on_release: Callable[[], object] | None = None
    held: object = None

    def release(self) -> None:
        """Ends the hold; a second call does nothing."""
        ended, self.on_release = self.on_release, None
        if ended is not None:
            ended()
