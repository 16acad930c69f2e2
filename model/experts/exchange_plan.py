"""The plan of an exchange of tokens among expert-parallel ranks, from the counts of all of them (no torch).

A *pair* is a token and one of its experts. Rank r of `ep` ranks holds experts [r E / ep, (r + 1) E / ep). It computes
its pairs in the order of (expert, rank that sends, token), so that every sum over an expert's tokens has one order. It
does so in rounds of at most a number of pairs that follows from the mean: a rank that many tokens choose needs more
rounds, not more memory. All ranks take part in every round, and all derive the rounds from the same counts.

Letters: R ranks, E experts, P pairs that this rank sends, S rounds.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...core.integers import ceil_div

Counts: TypeAlias = npt.NDArray[np.int64]
HEADROOM: Final = 1.25  # pairs that a rank computes in one round, times the mean of all ranks


@dataclass(frozen=True, slots=True)
class Round:
    """One round, from the side of one rank.

    Attributes:
        sent: the number of pairs for each rank.
        received: the number of pairs from each rank.
        order: int64, the received pairs in the order of their computation, as places among those that arrive, which
            are ordered by (rank that sends, expert, token).
        counts: the number of received pairs of each of this rank's experts.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Counts
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All rounds of an exchange, from the side of one rank.

    Attributes:
        order_P: int64, this rank's pairs in the order in which it sends them, round after round, as places among its
            pairs that are sorted by (expert, token).
        rounds: at least one.
    """

    order_P: Counts
    rounds: tuple[Round, ...]


def plan_exchange(counts_RE: Counts, rank: int) -> ExchangePlan:
    """Returns the plan of one rank.

    Args:
        counts_RE: int64, the number of pairs that each rank has for each expert; R divides E.
        rank: the rank that the plan is for.
    """
    counts_SRE = _counts_of_rounds(counts_RE)
    num_ranks = len(counts_RE)
    targets_SRRE = counts_SRE.reshape(*counts_SRE.shape[:2], num_ranks, -1)  # round, sender, receiver, its experts
    starts_E = np.cumsum(counts_RE[rank]) - counts_RE[rank]
    done_SE = np.cumsum(counts_SRE[:, rank], axis=0) - counts_SRE[:, rank]
    order_P = _ranges((starts_E + done_SE).ravel(), counts_SRE[:, rank].ravel())
    return ExchangePlan(order_P, tuple(_round(targets_RRE, rank) for targets_RRE in targets_SRRE))


def _counts_of_rounds(counts_RE: Counts) -> Counts:
    """Returns how many pairs each rank sends to each expert in each round, [S, R, E].

    A receiver's pairs in the order of their computation are cut after every so many.
    """
    num_ranks, num_experts = counts_RE.shape
    most = max(1, int(np.ceil(HEADROOM * counts_RE.sum() / num_ranks)))
    # The blocks of pairs from a rank to an expert, in the order of the receiver: [receiver, expert, sender].
    blocks = counts_RE.T.reshape(num_ranks, -1)
    ends = np.cumsum(blocks, axis=1)
    num_rounds = max(1, ceil_div(int(ends[:, -1].max()), most))
    bounds = most * np.arange(num_rounds + 1)[:, None, None]
    before = np.clip(bounds - (ends - blocks), 0, blocks)  # pairs of each block in all rounds before a bound
    return np.diff(before, axis=0).reshape(num_rounds, num_experts, num_ranks).swapaxes(1, 2)


def _round(counts_RRE: Counts, rank: int) -> Round:
    """Returns a round of one rank, from what each rank sends to each of each rank's experts."""
    received_RE = counts_RRE[:, rank]
    starts_RE = (np.cumsum(received_RE) - received_RE.ravel()).reshape(received_RE.shape)
    return Round(
        sent=tuple(counts_RRE[rank].sum(axis=-1).tolist()),
        received=tuple(received_RE.sum(axis=-1).tolist()),
        order=_ranges(starts_RE.T.ravel(), received_RE.T.ravel()),
        counts=tuple(received_RE.sum(axis=0).tolist()),
    )


def _ranges(starts: Counts, lengths: Counts) -> Counts:
    """Returns the whole numbers of ranges, one range after another."""
    skipped = starts - (np.cumsum(lengths) - lengths)
    numbers: Counts = np.arange(lengths.sum()) + np.repeat(skipped, lengths)
    return numbers
