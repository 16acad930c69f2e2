"""The engine's half of the persistent batch: it gives running samples slots and writes the changes of each step."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....core.casts import Array
from ..request.sampling_params import SamplingParams
from ..step.sampling_rows import NO_LOGPROBS, NO_MASK, OPTION_COLUMNS, WITH_CANDIDATES, ScoredRow
from ..step.slot_entries import TokenCounts
from ..step.step_message import NEXT_TOKENS, OPENED, GivenTokens, NextTokens, StepMessage
from .samples.sample import UNKNOWN, Sample, ScheduledChunk, Status


@dataclass(slots=True)
class _Slot:
    """The slot of a sample: its number, the sample's preemptions when it was opened, the blocks sent so far.

    It is plain if its rows have neither bias nor counts.
    """

    number: int
    preemptions: int
    is_plain: bool
    num_blocks: int = 0


class BatchWriter:
    """The slots of the workers. Only the engine's thread uses it.

    Args:
        num_slots: the largest number of running samples.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[Sample, _Slot] = {}
        self._going: list[tuple[Sample, _Slot]] = []  # of the step before, if `GivenTokens` could follow it
        self._is_decoding = False  # whether `NextTokens` could, too

    def can_write(self, chunk: ScheduledChunk) -> bool:
        """Returns whether a chunk can be computed before the sample's last token is known.

        It cannot if the sample is complete with that token, or if a preemption took its slot, where the workers keep
        the token: then the slot's options, counts and tokens must be sent again.
        """
        sample = chunk.sample
        if not sample.output.tokens or sample.output.tokens[-1] != UNKNOWN:
            return True
        slot = self._slots.get(sample)
        held = slot is not None and slot.preemptions == sample.preemptions
        return held and chunk.start + 1 < sample.output.max_tokens

    def release(self, sample: Sample) -> None:
        """Frees the slot of a sample that has ended, if it has one."""
        slot = self._slots.pop(sample, None)
        if slot is not None:
            self._free.append(slot.number)
            self._going = []

    def write(
        self, chunks: Sequence[ScheduledChunk], scored: Sequence[ScoredRow] = (), with_candidates: bool = False
    ) -> StepMessage | NextTokens | GivenTokens:
        """Returns the message of a step.

        Args:
            chunks: the scheduled chunks. The last token of a sample that the writer holds may be UNKNOWN.
            scored: the rows that score known tokens, with ascending indexes among the chunks' tokens.
            with_candidates: whether rows may have candidates instead of masks; the same as in the step before if that
                decoded the same samples.
        """
        if not scored and self._only_go_on(chunks):
            if self._is_decoding and self._only_decode(chunks):
                blocks = self._new_blocks()
                return NextTokens(_ints(blocks).reshape(-1, 2)) if blocks else NEXT_TOKENS
            if all(each.is_last and not each.sure and each.sample.output.matcher is None for each in chunks):
                return self._given(chunks)
        return self._changes(chunks, scored, with_candidates)

    def _only_go_on(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Returns whether chunks are of the samples of the step before, with nothing new but their blocks."""
        return len(chunks) == len(self._going) and all(
            chunk.sample is sample
            and not (table := sample.table).twins
            and table.fork is None
            and slot.preemptions == sample.preemptions
            for chunk, (sample, slot) in zip(chunks, self._going, strict=True)
        )

    def _only_decode(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Returns whether chunks compute just the tokens that the step before samples."""
        return all(
            chunk.length == 1
            and sample.output.tokens[-1] == UNKNOWN
            and len(sample.table.blocks) <= slot.num_blocks + 1
            for chunk, (sample, slot) in zip(chunks, self._going, strict=True)
        )

    def _given(self, chunks: Sequence[ScheduledChunk]) -> GivenTokens:
        spans, tokens, blocks = (array("i") for _ in range(3))
        for i, (chunk, (sample, slot)) in enumerate(zip(chunks, self._going, strict=True)):
            num_rows, table = 1 + len(chunk.proposals), sample.table.blocks
            spans.extend((chunk.start, chunk.length, len(sample.output.tokens), num_rows))
            tokens.extend(sample.tokens(chunk.start, chunk.stop))
            tokens.extend(chunk.proposals)
            for place in range(slot.num_blocks, len(table)):
                blocks.extend((i, place, table[place]))
            slot.num_blocks = len(table)
        self._is_decoding = len(tokens) == len(chunks)
        return GivenTokens(_ints(spans).reshape(-1, 4), _ints(tokens), _ints(blocks).reshape(-1, 3))

    def _new_blocks(self) -> "array[int]":
        """Returns the numbers of the spans that have a new block, and the blocks, in turn."""
        blocks = array("i")
        for i, (sample, slot) in enumerate(self._going):
            if len(sample.table.blocks) > slot.num_blocks:
                slot.num_blocks += 1
                blocks.extend((i, sample.table.blocks[-1]))
        return blocks

    def _changes(
        self, chunks: Sequence[ScheduledChunk], scored: Sequence[ScoredRow], with_candidates: bool
    ) -> StepMessage:
        going: list[tuple[Sample, _Slot]] = []
        spans, tokens, blocks, twins, forks = (array("i") for _ in range(5))
        opened: list[tuple[int, Sample]] = []
        num_masks = 0
        for chunk in chunks:
            sample, start, stop = chunk.sample, chunk.start, chunk.stop
            slot = self._slots.get(sample)
            if slot is None or slot.preemptions != sample.preemptions:
                slot = self._open(sample)
                opened.append((slot.number, sample))
            num_prompt, output, table = sample.num_prompt, sample.output, sample.table
            is_fed = stop > num_prompt and output.tokens[stop - num_prompt - 1] == UNKNOWN
            if is_fed:
                assert stop - start == 1, "an unknown token is computed alone, or before proposals"
            elif stop - start == 1:
                is_new = start >= num_prompt
                tokens.append(output.tokens[start - num_prompt] if is_new else sample.request.token_ids[start])
            else:
                tokens.extend(sample.tokens(start, stop))
            tokens.extend(chunk.proposals)
            num_added = len(table.blocks) - slot.num_blocks
            if num_added:
                blocks.extend(table.blocks[slot.num_blocks :])
                slot.num_blocks += num_added
            if table.twins:
                twins.extend(table.twins)
                table.twins = []
            if table.fork is not None:
                forks.extend((slot.number, *table.fork))
                table.fork = None
            has_candidates = with_candidates and output.has_candidates
            is_masked = chunk.is_last and output.matcher is not None and not has_candidates
            mask = WITH_CANDIDATES if has_candidates else num_masks if is_masked else NO_MASK
            num_sure = len(chunk.sure)
            num_rows = 1 + len(chunk.proposals) - num_sure if chunk.is_last else 0
            length, num_new = chunk.length, len(output.tokens) + num_sure
            spans.extend((slot.number, start, length, length - is_fed, num_new, num_rows, num_added, mask))
            num_masks += num_rows if is_masked else 0
            if num_rows and slot.is_plain:
                going.append((sample, slot))
        self._going = going if len(going) == len(chunks) and not (twins or forks or scored) else []
        self._is_decoding = sum(spans[2::8]) == sum(spans[5::8]) == len(chunks)
        rows = array("i", [value for row in scored for value in (row.token, row.target, row.num_top)])
        return StepMessage(
            _ints(spans).reshape(-1, 8),
            _ints(tokens),
            _ints(blocks),
            _ints(twins).reshape(-1, 2),
            _ints(forks).reshape(-1, 4),
            *self._options(opened),
            _ints(rows).reshape(-1, 3),
        )

    def _open(self, sample: Sample) -> _Slot:
        slot = self._slots.get(sample)
        if slot is None and not self._free:
            for other in [other for other in self._slots if other.status is not Status.RUNNING]:
                self.release(other)
        number, params = slot.number if slot is not None else self._free.pop(), sample.request.params
        is_plain = not (params.logit_bias or params.min_new_tokens or params.has_penalties)
        self._slots[sample] = opened = _Slot(number, sample.preemptions, is_plain)
        return opened

    def _options(self, opened: Sequence[tuple[int, Sample]]) -> tuple[Array, Array, Array, Array, Array]:
        """Returns the sections `opened` to `counts`."""
        rows = np.zeros(len(opened), OPENED)
        bias: dict[str, list[Array]] = {"token": [], "value": []}
        banned, counts = array("i"), [np.empty((0, 2), np.int32)]
        for i, (number, sample) in enumerate(opened):
            params, row = sample.request.params, rows[i]
            stopping = list(sample.output.stopping) if params.min_new_tokens else []  # banned until then
            counted = count_tokens(sample)
            row["slot"], row["seed"], row["sample_index"] = number, sample.seed, sample.index
            row["adapter"] = sample.adapter
            row["num_top"] = NO_LOGPROBS if params.logprobs is None else params.logprobs
            row["num_bias"], row["num_banned"] = len(params.logit_bias), len(stopping)
            row["num_counts"] = -1 if counted is None else len(counted)
            for name in ("min_new_tokens", *OPTION_COLUMNS):
                row[name] = getattr(params, name)
            bias["token"].append(np.array(list(params.logit_bias), np.int32))
            bias["value"].append(np.array(list(params.logit_bias.values()), np.float32))
            banned.extend(stopping)
            counts += [] if counted is None else [np.stack(counted.columns(), axis=1)]
        tokens, values = (np.concatenate([np.empty(0), *parts]) for parts in bias.values())
        return rows, tokens.astype(np.int32), values.astype(np.float32), _ints(banned), np.concatenate(counts)


def count_tokens(sample: Sample) -> TokenCounts | None:
    """Returns the tokens under penalties, counted in all of a sample; None without penalties."""
    params: SamplingParams = sample.request.params
    if not params.has_penalties:
        return None
    prompt = sample.request.token_ids if params.has_prompt_penalty else ()
    counts = TokenCounts(dict.fromkeys(prompt, 0))
    counts.add(sample.output.tokens)
    return counts


def _ints(values: "array[int]") -> Array:
    return np.frombuffer(values, np.int32) if values else np.empty(0, np.int32)
