"""The samples of requests whose prompts are not computed yet: one of them leads, and the others wait for its blocks."""

from collections.abc import Iterator

from ..samples.sample import Sample


class SampleGroups:
    """The samples that follow a leader; `len` is their number. No operation looks at other requests' samples."""

    def __init__(self) -> None:
        self._followers: dict[Sample, list[Sample]] = {}
        self._leaders: dict[Sample, Sample] = {}

    def __len__(self) -> int:
        return len(self._leaders)

    def __iter__(self) -> Iterator[Sample]:
        """Iterates over all followers, in no particular order."""
        return iter(self._leaders)

    def add(self, samples: list[Sample]) -> None:
        """Lets the samples of a request follow the first one."""
        leader, *followers = samples
        if followers:
            self._followers[leader] = followers
            self._leaders.update(dict.fromkeys(followers, leader))

    def part(self, leader: Sample) -> list[Sample]:
        """Returns the followers of a sample, which then follow no longer; none if it leads no group."""
        followers = self._followers.pop(leader, [])
        for follower in followers:
            del self._leaders[follower]
        return followers

    def leave(self, sample: Sample) -> Sample | None:
        """Takes a sample out of its group, if it has one.

        Returns:
            The follower that leads from now on, if the sample led.
        """
        leader = self._leaders.pop(sample, None)
        if leader is not None:
            self._followers[leader].remove(sample)
            return None
        followers = self.part(sample)
        if not followers:
            return None
        self.add(followers)
        return followers[0]
