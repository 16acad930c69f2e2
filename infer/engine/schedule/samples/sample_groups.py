"""The samples of requests whose prompts are not computed yet: one of them leads, and the others wait for its blocks."""

from collections.abc import Iterator

from .sequence import Sequence


class SampleGroups:
    """The samples that follow a leader; `len` is their number. No operation looks at other requests' samples."""

    def __init__(self) -> None:
        self._followers: dict[Sequence, list[Sequence]] = {}
        self._leaders: dict[Sequence, Sequence] = {}

    def __len__(self) -> int:
        return len(self._leaders)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over all followers, in no particular order."""
        return iter(self._leaders)

    def add(self, samples: list[Sequence]) -> None:
        """Lets the samples of a request follow the first one."""
        leader, *followers = samples
        if followers:
            self._followers[leader] = followers
            self._leaders.update(dict.fromkeys(followers, leader))

    def part(self, leader: Sequence) -> list[Sequence]:
        """Returns the followers of a sequence, which then follow no longer; none if it leads no group."""
        followers = self._followers.pop(leader, [])
        for follower in followers:
            del self._leaders[follower]
        return followers

    def leave(self, sequence: Sequence) -> Sequence | None:
        """Takes a sequence out of its group, if it has one.

        Returns:
            The follower that leads from now on, if the sequence led.
        """
        leader = self._leaders.pop(sequence, None)
        if leader is not None:
            self._followers[leader].remove(sequence)
            return None
        followers = self.part(sequence)
        if not followers:
            return None
        self.add(followers)
        return followers[0]
