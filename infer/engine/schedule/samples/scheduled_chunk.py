"""The part of a step that belongs to one sequence."""

from dataclasses import dataclass

from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, start + length) of a sequence, which one step computes; the last of them may be proposals."""

    sequence: Sequence
    start: int
    length: int
    proposals: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """The end of the sequence's own tokens, where the proposals begin."""
        return self.start + self.length - len(self.proposals)

    @property
    def is_last(self) -> bool:
        """Whether the step reaches the sequence's last token, after which a new one is chosen."""
        return self.stop == self.sequence.num_tokens
