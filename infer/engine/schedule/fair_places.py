"""The places of the batch by fair shares: which running sequences yield to a waiting one of another principal.

A principal's share is its weight's part of the places, among the principals with live sequences. Blocks count as
places: a sequence takes one, or as many as its part of the cache amounts to if that is more (Ghodsi et al., "Dominant
Resource Fairness", NSDI 2011). No place is kept empty for anybody: a principal may take more than its share, and gives
it back.

Only a principal above its share yields, and only while it stays ahead. The claim of a principal is its virtual time
(`FairShare`; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) as it will be in a while: its places
add to it for HORIZON steps. A place moves if the claim of the one who loses it is then still at least the claim of the
one who gets it. So places come to match the shares, what whole places leave over goes round by the tokens served,
and no move is taken back at once. A principal without a place gets its first one as if it took none; the first place of
a request that has not begun, if its principal is not in debt, is owed to it by any principal above its share.

A move costs time: what has left the cache is computed again. So a sequence yields only after a quantum. It is shorter
for the first place of a request that has not begun, and is shared by the principals, as the period of the Completely
Fair Scheduler of Linux is: all of them get a first token within about FIRST_PLACE_SECONDS. The oldest sequence of a
principal has first computed again what it lost, and then runs for as long as that took: everyone ends, and at most half
of the time is lost. Of a principal its newest sequence yields, which has least to lose, a low priority before
a high one, and never one of a priority above that of the waiting one. Tokens that are computed again are not charged.

Time is the seconds of steps, as `Scheduler.observe` learns them. With one principal nothing here has an effect.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final

from .blocks.block_tables import BlockTables
from .samples.scheduled_chunk import ScheduledChunk
from .samples.sequence import Sequence
from .waiting.fair_share import FairShare
from .waiting.limits import Limits
from .waiting.wait_queue import WaitQueue

HORIZON: Final = 32  # steps
FIRST_PLACE_SECONDS: Final = 0.5
QUANTUM_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = 0.02  # the effort to look for victims in vain is a small part of it


@dataclass(slots=True)
class _Occupant:
    """A principal with running sequences.

    Attributes:
        may_yield: those that may yield to a waiting sequence, the last one first to go.
        load: how many places all of its sequences take.
    """

    may_yield: list[Sequence]
    load: float = 0.0


class FairPlaces:
    """The policy over the scheduler's own books. Its work grows with the running sequences only.

    Args:
        limits: the limits.
        tables: the blocks.
        shares: the virtual times of principals.
        running: the running sequences, in the order in which they are computed.
        waiting: the waiting ones.
    """

    def __init__(
        self, limits: Limits, tables: BlockTables, shares: FairShare, running: list[Sequence], waiting: WaitQueue
    ) -> None:
        self._limits, self._tables, self._shares = limits, tables, shares
        self._running, self._waiting = running, waiting
        self._places_per_block = limits.max_running / tables.allocator.num_blocks
        self._seconds = 0.0
        self._are_behind = False  # whether running sequences have yet to catch up
        self._denied: dict[Sequence, float] = {}  # those for whom nobody had to yield, and until when that holds

    def pass_time(self, seconds: float) -> None:
        """Records that a step took so long."""
        self._seconds += seconds

    def admit(self, sequence: Sequence) -> None:
        """Records that a sequence was admitted: its quantum begins."""
        sequence.admitted, sequence.caught_up = self._seconds, None
        self._are_behind = True

    def charge(self, decoding: list[ScheduledChunk], prompts: list[ScheduledChunk]) -> None:
        """Charges principals for the tokens of a step that were not computed before; one alone pays for none.

        Where every known token of every running sequence is computed, those with no waiting one have all they ask for.
        """
        if self._are_behind:
            self._catch_up(*decoding, *prompts)
        if self._shares.num_busy < 2:
            return
        charged: dict[str, int] = {}
        for chunks in (decoding, prompts):
            for chunk in chunks:
                sequence, num_new = chunk.sequence, chunk.length
                if chunk.start < sequence.num_charged:
                    num_new -= min(chunk.stop, sequence.num_charged) - chunk.start
                charged[sequence.principal] = charged.get(sequence.principal, 0) + num_new
        for principal, num_tokens in charged.items():
            self._shares.charge(principal, num_tokens)
        if len(decoding) + len(prompts) == len(self._running) and all(chunk.is_last for chunk in prompts):
            for principal in charged:
                if not self._waiting.has(principal):
                    self._shares.settle(principal)

    def victims(self, first: Sequence) -> list[Sequence]:
        """Returns the running sequences that yield so that a waiting one can be admitted; none if that is not due."""
        if self._shares.num_busy < 2 or not self._running:
            return []
        if self._seconds < self._denied.get(first, self._seconds):
            return []
        chosen = self._choose(first)
        if not chosen:
            self._denied = {s: until for s, until in self._denied.items() if until > self._seconds}
            self._denied[first] = self._seconds + PAUSE_SECONDS
        return chosen

    def comes_first(self, first: Sequence) -> bool:
        """Returns whether a waiting sequence would get tokens of the next step before a prompt that is computed."""
        if self._shares.num_busy < 2 or len(self._running) >= self._limits.max_running:
            return False
        time, num_own, is_behind = self._shares.time(first.principal), 0, False
        for sequence in self._running:
            if sequence.principal == first.principal:
                num_own += sequence.num_uncomputed
            elif sequence.num_uncomputed > 1 and sequence.priority <= first.priority:
                is_behind = is_behind or self._shares.time(sequence.principal) > time
        return is_behind and num_own < self._limits.max_batched_tokens

    def last(self) -> Sequence:
        """Returns the running sequence that loses its blocks when they run out.

        It is of the lowest priority, and there the newest of the principal furthest above its share.
        """
        newest = self._running[-1]
        if self._shares.num_busy < 2:
            return newest
        lowest = {s.principal: s for s in self._running if s.priority == newest.priority}
        loads = dict.fromkeys(lowest, 0.0)
        for sequence in self._running:
            if sequence.principal in loads:
                loads[sequence.principal] += self._size(len(sequence.blocks))
        return max(lowest.values(), key=lambda s: (loads[s.principal] / s.weight, s.order))

    def leave_room(self, decoding: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Returns the decoding sequences of a step that leaves room for prompts.

        If others have prompts and fewer tokens of the step are left than are their share, a principal that decodes more
        than its own share stays at it: its newest sequences miss the step.
        """
        most = self._limits.max_batched_tokens
        if self._shares.num_busy < 2 or len(decoding) == len(self._running):
            return decoding
        if sum(sequence.num_uncomputed for sequence in self._running) <= most:
            return decoding
        wanted, decoded = Counter[str](), Counter(chunk.sequence.principal for chunk in decoding)
        weights = {sequence.principal: sequence.weight for sequence in self._running}
        for sequence in self._running:
            wanted[sequence.principal] += sequence.num_uncomputed
        due = {p: int(most * self._shares.part(p, weight)) for p, weight in weights.items()}
        missing = sum(max(0, min(wanted[p], due[p]) - decoded[p]) for p in wanted) - (most - len(decoding))
        kept: list[ScheduledChunk] = []
        for chunk in reversed(decoding):
            principal = chunk.sequence.principal
            if missing > 0 and decoded[principal] > max(1, due[principal]):
                decoded[principal] -= 1
                missing -= 1
            else:
                kept.append(chunk)
        return kept[::-1]

    def prompts(self) -> list[Sequence]:
        """Returns the running sequences with prompts, in the order in which they get the tokens of a step."""
        prompts = [sequence for sequence in self._running if sequence.num_uncomputed > 1]
        return sorted(prompts, key=lambda s: (-s.priority, self._shares.time(s.principal)))

    def _catch_up(self, *chunks: ScheduledChunk) -> None:
        """Records which sequences have again all tokens of before after a step."""
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.caught_up is None and chunk.stop > sequence.num_charged:
                sequence.caught_up = self._seconds
        self._are_behind = any(sequence.caught_up is None for sequence in self._running)

    def _choose(self, first: Sequence) -> list[Sequence]:
        num_places = len(self._running) + 1 - self._limits.max_running
        num_blocks = self._tables.num_lacking(first) + len(self._running)  # as many as `Scheduler` keeps available
        if max(num_places, num_blocks) <= 0 or self._tables.is_coming(first, self._running):
            return []
        occupants, chosen = self._occupants(first), list[Sequence]()
        own = occupants.pop(first.principal, None)
        claim = self._shares.time(first.principal)
        if own is not None:
            claim += HORIZON * (own.load + self._size(self._tables.missing(first))) / first.weight
        elif not first.has_begun and not self._shares.is_in_debt(first.principal):
            claim = -math.inf
        while len(chosen) < num_places or not self._is_enough(num_blocks, chosen):
            found = max((h for h in occupants.values() if self._is_above(h)), key=self._claim_without, default=None)
            if found is None or self._claim_without(found) < claim:
                return []
            if own is None and self._claim_without(found) == claim:
                return []
            chosen.append(found.may_yield.pop())
            found.load -= self._size(len(chosen[-1].blocks))
        return chosen

    def _occupants(self, first: Sequence) -> dict[str, _Occupant]:
        is_first_place = all(s.principal != first.principal for s in self._running)
        quantum = QUANTUM_SECONDS
        if is_first_place and not first.has_begun:
            quantum = FIRST_PLACE_SECONDS * min(1.0, self._limits.max_running / self._shares.num_busy)
        occupants: dict[str, _Occupant] = {}
        for sequence in self._running:
            occupant = occupants.get(sequence.principal)
            is_oldest = occupant is None
            if occupant is None:
                occupant = occupants[sequence.principal] = _Occupant([])
            occupant.load += self._size(len(sequence.blocks))
            if sequence.priority <= first.priority and self._is_over(sequence, quantum, is_oldest):
                occupant.may_yield.append(sequence)
        return occupants

    def _is_over(self, sequence: Sequence, quantum: float, is_oldest: bool) -> bool:
        """Returns whether a running sequence has had its quantum."""
        if not is_oldest:
            return self._seconds - sequence.admitted >= quantum
        if sequence.caught_up is None:
            return False
        return self._seconds - sequence.caught_up >= max(quantum, sequence.caught_up - sequence.admitted)

    def _is_above(self, occupant: _Occupant) -> bool:
        """Returns whether a principal has more than its share, and a sequence that may yield."""
        if not occupant.may_yield:
            return False
        sequence = occupant.may_yield[-1]
        return occupant.load > self._limits.max_running * self._shares.part(sequence.principal, sequence.weight)

    def _claim_without(self, occupant: _Occupant) -> float:
        """Returns the claim of a principal after its next sequence has yielded."""
        sequence = occupant.may_yield[-1]
        load = occupant.load - self._size(len(sequence.blocks))
        return self._shares.time(sequence.principal) + HORIZON * load / sequence.weight

    def _size(self, num_blocks: int) -> float:
        """Returns how many places a sequence with so many blocks takes."""
        size = num_blocks * self._places_per_block
        return size if size > 1.0 else 1.0

    def _is_enough(self, num_blocks: int, chosen: list[Sequence]) -> bool:
        """Returns whether these sequences free as many blocks as a waiting one lacks, beside one for each that runs."""
        num_lacking = num_blocks - len(chosen)
        if num_lacking <= 0 or sum(len(s.blocks) for s in chosen) < num_lacking:
            return num_lacking <= 0
        return self._tables.allocator.num_freed(s.blocks for s in chosen) >= num_lacking
