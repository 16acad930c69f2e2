"""The places of the batch by fair shares: which running samples yield to a waiting one of another principal.

A principal's share is its weight's part of the places, among the principals with live samples. Blocks count as
places: a sample takes one, or as many as its part of the cache amounts to if that is more (Ghodsi et al., "Dominant
Resource Fairness", NSDI 2011). No place is kept empty for anybody: a principal may take more than its share, and gives
it back.

Only a principal above its share yields, and only while it stays ahead. The claim of a principal is its virtual time
(`FairShare`; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) as it will be in a while: its places
add to it for HORIZON steps. A place moves if the claim of the one who loses it is then still at least the claim of the
one who gets it. So places come to match the shares, what whole places leave over goes round by the tokens served,
and no move is taken back at once. A principal without a place gets its first one as if it took none; the first place of
a request that has not begun, if its principal is not in debt, is owed to it by any principal above its share.

A move costs time: what has left the cache is computed again. So a sample yields only after a quantum. It is shorter
for the first place of a request that has not begun, and is shared by the principals, as the period of the Completely
Fair Scheduler of Linux is: all of them get a first token within about FIRST_PLACE_SECONDS. The oldest sample of a
principal has first computed again what it lost, and then runs for as long as that took: everyone ends, and at most half
of the time is lost. Of a principal its newest sample yields, which has least to lose, a low priority before
a high one, and never one of a priority above that of the waiting one. Tokens that are computed again are not charged.

Time is the seconds of steps, as `Scheduler.observe` learns them. With one principal nothing here has an effect.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final

from .block_manager import BlockManager
from .samples.sample import Sample, ScheduledChunk
from .waiting.admission import Limits
from .waiting.request_queue import RequestQueue

HORIZON: Final = 32  # steps
FIRST_PLACE_SECONDS: Final = 0.5
QUANTUM_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = 0.02  # the effort to look for victims in vain is a small part of it


@dataclass(slots=True)
class _Occupant:
    """A principal with running samples.

    Attributes:
        may_yield: those that may yield to a waiting sample, the last one first to go.
        load: how many places all of its samples take.
    """

    may_yield: list[Sample]
    load: float = 0.0


class FairPlaces:
    """The policy over the scheduler's own queues. Its work grows with the running samples only.

    Args:
        running: the running samples, in the order in which they are computed.
        queue: the other ones.
    """

    def __init__(self, limits: Limits, blocks: BlockManager, running: list[Sample], queue: RequestQueue) -> None:
        self._limits, self._blocks = limits, blocks
        self._running, self._waiting, self._shares = running, queue.waiting, queue.shares
        self._places_per_block = limits.max_running / blocks.allocator.num_blocks
        self._seconds = 0.0
        self._are_behind = False  # whether running samples have yet to catch up
        self._denied: dict[Sample, float] = {}  # those for whom no sample had to yield, and until when that holds

    def pass_time(self, seconds: float) -> None:
        """Records that a step took so long."""
        self._seconds += seconds

    def admit(self, sample: Sample) -> None:
        """Records that a sample was admitted: its quantum begins."""
        sample.quantum.admitted, sample.quantum.caught_up = self._seconds, None
        self._are_behind = True

    def charge(self, decoding: list[ScheduledChunk], prompts: list[ScheduledChunk]) -> None:
        """Charges principals for the tokens of a step that were not computed before; one alone pays for none.

        Where every known token of every running sample is computed, those with no waiting one have all they ask for.
        """
        if self._are_behind:
            self._catch_up(*decoding, *prompts)
        if self._shares.num_busy < 2:
            return
        charged: dict[str, int] = {}
        for chunks in (decoding, prompts):
            for chunk in chunks:
                num_charged, principal, num_new = (
                    chunk.sample.quantum.num_charged,
                    chunk.sample.request.principal,
                    chunk.length,
                )
                if chunk.start < num_charged:
                    num_new -= min(chunk.stop, num_charged) - chunk.start
                charged[principal] = charged.get(principal, 0) + num_new
        for principal, num_tokens in charged.items():
            self._shares.charge(principal, num_tokens)
        if len(decoding) + len(prompts) == len(self._running) and all(chunk.is_last for chunk in prompts):
            for principal in charged:
                if not self._waiting.has(principal):
                    self._shares.settle(principal)

    def victims(self, first: Sample) -> list[Sample]:
        """Returns the running samples that yield so that a waiting one can be admitted; none if that is not due."""
        if self._shares.num_busy < 2 or not self._running:
            return []
        if self._seconds < self._denied.get(first, self._seconds):
            return []
        chosen = self._choose(first)
        if not chosen:
            self._denied = {s: until for s, until in self._denied.items() if until > self._seconds}
            self._denied[first] = self._seconds + PAUSE_SECONDS
        return chosen

    def comes_first(self, first: Sample) -> bool:
        """Returns whether a waiting sample would get tokens of the next step before a prompt that is computed."""
        if self._shares.num_busy < 2 or len(self._running) >= self._limits.max_running:
            return False
        time, num_own, is_behind = self._shares.time(first.request.principal), 0, False
        for sample in self._running:
            if sample.request.principal == first.request.principal:
                num_own += sample.num_uncomputed
            elif sample.num_uncomputed > 1 and sample.request.priority <= first.request.priority:
                is_behind = is_behind or self._shares.time(sample.request.principal) > time
        return is_behind and num_own < self._limits.max_batched_tokens

    def last(self) -> Sample:
        """Returns the running sample that loses its blocks when they run out.

        It is of the lowest priority, and there the newest of the principal furthest above its share.
        """
        newest = self._running[-1]
        if self._shares.num_busy < 2:
            return newest
        lowest = {s.request.principal: s for s in self._running if s.request.priority == newest.request.priority}
        loads = dict.fromkeys(lowest, 0.0)
        for sample in self._running:
            if sample.request.principal in loads:
                loads[sample.request.principal] += self._size(len(sample.table.blocks))
        return max(lowest.values(), key=lambda s: (loads[s.request.principal] / s.request.weight, s.order))

    def leave_room(self, decoding: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Returns the decoding samples of a step that leaves room for prompts.

        If others have prompts and fewer tokens of the step are left than are their share, a principal that decodes more
        than its own share stays at it: its newest samples miss the step.
        """
        most = self._limits.max_batched_tokens
        if self._shares.num_busy < 2 or len(decoding) == len(self._running):
            return decoding
        if sum(sample.num_uncomputed for sample in self._running) <= most:
            return decoding
        wanted, decoded = Counter[str](), Counter(chunk.sample.request.principal for chunk in decoding)
        weights = {sample.request.principal: sample.request.weight for sample in self._running}
        for sample in self._running:
            wanted[sample.request.principal] += sample.num_uncomputed
        due = {p: int(most * self._shares.part(p, weight)) for p, weight in weights.items()}
        missing = sum(max(0, min(wanted[p], due[p]) - decoded[p]) for p in wanted) - (most - len(decoding))
        kept: list[ScheduledChunk] = []
        for chunk in reversed(decoding):
            principal = chunk.sample.request.principal
            if missing > 0 and decoded[principal] > max(1, due[principal]):
                decoded[principal] -= 1
                missing -= 1
            else:
                kept.append(chunk)
        return kept[::-1]

    def prompts(self) -> list[Sample]:
        """Returns the running samples with prompts, in the order in which they get the tokens of a step."""
        prompts = [sample for sample in self._running if sample.num_uncomputed > 1]
        return sorted(prompts, key=lambda s: (-s.request.priority, self._shares.time(s.request.principal)))

    def _catch_up(self, *chunks: ScheduledChunk) -> None:
        """Records which samples have again all tokens of before after a step."""
        for chunk in chunks:
            sample = chunk.sample
            if sample.quantum.caught_up is None and chunk.stop > sample.quantum.num_charged:
                sample.quantum.caught_up = self._seconds
        self._are_behind = any(sample.quantum.caught_up is None for sample in self._running)

    def _choose(self, first: Sample) -> list[Sample]:
        num_places = len(self._running) + 1 - self._limits.max_running
        num_blocks = self._blocks.num_lacking(first) + len(self._running)  # as many as `Scheduler` keeps available
        if max(num_places, num_blocks) <= 0 or self._blocks.is_coming(first, self._running):
            return []
        occupants, chosen = self._occupants(first), list[Sample]()
        own = occupants.pop(first.request.principal, None)
        claim = self._shares.time(first.request.principal)
        if own is not None:
            claim += HORIZON * (own.load + self._size(self._blocks.missing(first))) / first.request.weight
        elif not first.has_begun and not self._shares.is_in_debt(first.request.principal):
            claim = -math.inf
        while len(chosen) < num_places or not self._is_enough(num_blocks, chosen):
            found = max((h for h in occupants.values() if self._is_above(h)), key=self._claim_without, default=None)
            if found is None or self._claim_without(found) < claim:
                return []
            if own is None and self._claim_without(found) == claim:
                return []
            chosen.append(found.may_yield.pop())
            found.load -= self._size(len(chosen[-1].table.blocks))
        return chosen

    def _occupants(self, first: Sample) -> dict[str, _Occupant]:
        is_first_place = all(s.request.principal != first.request.principal for s in self._running)
        quantum = QUANTUM_SECONDS
        if is_first_place and not first.has_begun:
            quantum = FIRST_PLACE_SECONDS * min(1.0, self._limits.max_running / self._shares.num_busy)
        occupants: dict[str, _Occupant] = {}
        for sample in self._running:
            occupant = occupants.get(sample.request.principal)
            is_oldest = occupant is None
            if occupant is None:
                occupant = occupants[sample.request.principal] = _Occupant([])
            occupant.load += self._size(len(sample.table.blocks))
            if sample.request.priority <= first.request.priority and self._is_over(sample, quantum, is_oldest):
                occupant.may_yield.append(sample)
        return occupants

    def _is_over(self, sample: Sample, quantum: float, is_oldest: bool) -> bool:
        """Returns whether a running sample has had its quantum."""
        if not is_oldest:
            return self._seconds - sample.quantum.admitted >= quantum
        caught_up = sample.quantum.caught_up
        return caught_up is not None and self._seconds - caught_up >= max(quantum, caught_up - sample.quantum.admitted)

    def _is_above(self, occupant: _Occupant) -> bool:
        """Returns whether a principal has more than its share, and a sample that may yield."""
        if not occupant.may_yield:
            return False
        request = occupant.may_yield[-1].request
        return occupant.load > self._limits.max_running * self._shares.part(request.principal, request.weight)

    def _claim_without(self, occupant: _Occupant) -> float:
        """Returns the claim of a principal after its next sample has yielded."""
        sample = occupant.may_yield[-1]
        load = occupant.load - self._size(len(sample.table.blocks))
        return self._shares.time(sample.request.principal) + HORIZON * load / sample.request.weight

    def _size(self, num_blocks: int) -> float:
        """Returns how many places a sample with so many blocks takes."""
        size = num_blocks * self._places_per_block
        return size if size > 1.0 else 1.0

    def _is_enough(self, num_blocks: int, chosen: list[Sample]) -> bool:
        """Returns whether these samples free as many blocks as a waiting one lacks, beside one for each that runs."""
        num_lacking = num_blocks - len(chosen)
        if num_lacking <= 0 or sum(len(s.table.blocks) for s in chosen) < num_lacking:
            return num_lacking <= 0
        return self._blocks.allocator.num_freed(s.table.blocks for s in chosen) >= num_lacking
