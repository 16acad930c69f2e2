"""The two ways in which the experts of a layer are spread over ranks, with the way of the tokens in each.

Split: every tensor-parallel rank has a part of every expert and computes it for all tokens; the parts are summed.
Exchanged: expert-parallel ranks have different experts. Tokens are first dealt over the tensor-parallel ranks, which
hold the same ones, then sent to the ranks of their experts and back. If several ranks share an expert (expert_tp),
each computes a part of it for the tokens of all of them.

Letters: T tokens, D hidden size, E experts, K of them per token, P pairs of a token and one of its experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import torch

from ...parallel.collectives import all_gather, all_gather_dim
from ...parallel.functions import SEQUENCE, collect_sequence, deal_sequence, enter_block, leave_block
from ...parallel.layers import ExpertRanks
from ...parallel.mesh import Group
from ...parallel.row_exchange import RowExchange, return_rows, start_dispatch
from ...parallel.row_groups import RowGroups
from ...parallel.streams import sent
from ..placement import Placement
from ..recompute import recomputed
from .exchange_plan import ExchangePlan, Round, plan_exchange
from .experts import Experts
from .router import ExpertChoice
from .token_pairs import TokenPairs

Beside: TypeAlias = Callable[[], torch.Tensor | None]  # computes the shared expert, if there is one


class ExpertSpread(Protocol):
    """How experts are spread, from the side of a rank.

    Attributes:
        is_split: whether outputs of `sums` are partial sums, as those of other tensor-parallel blocks.
        num_shares: the number of ranks that compute the same scores, whose gradients are summed.
    """

    is_split: bool
    num_shares: int

    def enter(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Returns the tokens that this rank routes, from hidden states [..., D]."""

    def sums(
        self, x_TD: torch.Tensor, choice: ExpertChoice, experts: Experts, beside: Beside
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the weighted sums of the experts of these tokens, [T, D], as `leave` takes them, and beside().

        `beside` is called once, while tokens are on their way.
        """

    def leave(self, y_ND: torch.Tensor, length: int) -> torch.Tensor:
        """Returns hidden states, spread as those that `enter` got, of sequences of a length."""

    def whole(self, values: torch.Tensor, length: int) -> torch.Tensor:
        """Returns values [..., L, any] of all tokens that the tensor-parallel ranks route, from those of `enter`'s."""


class SplitExperts:
    """Each expert is split over the tensor-parallel ranks; outputs of `sums` and gradients of `enter` are partial."""

    def __init__(self, tp: Group, sequence_parallel: bool) -> None:
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.is_split, self.num_shares = True, tp.size

    def enter(self, x_ND: torch.Tensor) -> torch.Tensor:
        return enter_block(x_ND, self.tp, self.sequence_parallel)

    def sums(
        self, x_TD: torch.Tensor, choice: ExpertChoice, experts: Experts, beside: Beside
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        chosen_TK, order_TK = choice.chosen_TK.sort(dim=-1)
        pairs, ends_E = TokenPairs.by_expert(chosen_TK, experts.num_experts)
        y_PD = experts(pairs.spread(x_TD), RowGroups(ends_E))
        return pairs.weighted_sum(y_PD, choice.weights_TK.gather(-1, order_TK)), beside()

    def leave(self, y_ND: torch.Tensor, length: int) -> torch.Tensor:
        return leave_block(y_ND, self.tp, self.sequence_parallel)

    def whole(self, values: torch.Tensor, length: int) -> torch.Tensor:
        return values


class ExchangedExperts:
    """Experts are on different ranks, among which tokens are exchanged; every rank takes part, also without tokens.

    Received tokens are computed in rounds of a bounded size. If there are several and anything is recomputed, backward
    runs each round again by itself: a rank that many tokens choose then needs time, not memory.
    """

    def __init__(self, tp: Group, sequence_parallel: bool, ranks: ExpertRanks, recompute: bool) -> None:
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.ep, self.expert_tp = ranks.ep, ranks.expert_tp
        self.recompute = recompute
        self.is_split, self.num_shares = False, 1

    def enter(self, x_ND: torch.Tensor) -> torch.Tensor:
        return x_ND if self.sequence_parallel else deal_sequence(x_ND, self.tp)

    def sums(
        self, x_TD: torch.Tensor, choice: ExpertChoice, experts: Experts, beside: Beside
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # the tokens of all ranks that share an expert; with one rank these functions do nothing
        x_TD, weights_TK = (enter_block(each, self.expert_tp, True) for each in (x_TD, choice.weights_TK))
        chosen_TK, order_TK = all_gather_dim(choice.chosen_TK, SEQUENCE, self.expert_tp).sort(dim=-1)
        pairs, ends_E = TokenPairs.by_expert(chosen_TK, experts.num_experts * self.ep.size)
        ends_RE = torch.stack(all_gather(ends_E, self.ep)).cpu().numpy().astype(np.int64)
        plan = plan_exchange(np.diff(ends_RE, axis=1, prepend=0), self.ep.rank)
        pairs = pairs.arranged(sent(torch.from_numpy(plan.order_P), x_TD.device))
        y_PD, computed = self._in_rounds(pairs.spread(x_TD), plan, experts, beside)
        sums_TD = pairs.weighted_sum(y_PD, weights_TK.gather(-1, order_TK))
        return leave_block(sums_TD, self.expert_tp, True), computed

    def _in_rounds(
        self, x_PD: torch.Tensor, plan: ExchangePlan, experts: Experts, beside: Beside
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = x_PD.split([sum(each.sent) for each in plan.rounds])
        if self.recompute and len(plan.rounds) > 1:
            # beside() is no part of what is computed again: it exchanges among the tensor-parallel ranks, and others of
            # them, with another plan, may have one round only.
            computed = beside()
            run = partial(recomputed, self._round)
            outputs = [run(*part, experts, _nothing)[0] for part in zip(parts, plan.rounds, strict=True)]
            return torch.cat(outputs), computed
        first, *others = zip(parts, plan.rounds, strict=True)
        y_PD, computed = self._round(*first, experts, beside)
        return torch.cat([y_PD, *(self._round(*part, experts, _nothing)[0] for part in others)]), computed

    def _round(
        self, x_PD: torch.Tensor, current: Round, experts: Experts, beside: Beside
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the outputs of a round's pairs, and beside(), which is computed while they are on their way.

        On every rank it runs the same operations and keeps as many tensors. Otherwise ranks would differ in where a
        recomputation ends, and then in its collectives.
        """
        order = sent(torch.from_numpy(current.order), x_PD.device)
        exchange = RowExchange(self.ep, current.sent, current.received, order)
        arrived = start_dispatch(x_PD, exchange)
        computed = beside()
        groups = RowGroups.of(current.counts, x_PD.device)
        return return_rows(experts(arrived(), groups), exchange), computed

    def leave(self, y_ND: torch.Tensor, length: int) -> torch.Tensor:
        return y_ND if self.sequence_parallel else self.whole(y_ND, length)

    def whole(self, values: torch.Tensor, length: int) -> torch.Tensor:
        return collect_sequence(values, length, self.tp)


def _nothing() -> None:
    """Is computed beside the rounds that have nothing beside them."""


def spread_of(place: Placement) -> ExpertSpread:
    """Returns how a rank's experts are spread."""
    context = place.context
    if context.experts is None:
        return SplitExperts(context.tp, context.sequence_parallel)
    return ExchangedExperts(context.tp, context.sequence_parallel, context.experts, place.recompute != "none")
