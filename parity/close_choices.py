"""Tokens of a reference that rounding could send to another expert: no layout can be asked to choose as it does."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from ..model.experts.router import ExpertChoice, Router

ROUNDING: Final = 1e-6  # relative; layouts were seen to differ by 1e-7 in what routers read


class CloseChoices:
    """Counts the tokens whose experts would be others if the scores were off by rounding.

    Args:
        modules: the modules whose routers are watched.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._count = 0
        for module in modules:
            for router in module.modules():
                if isinstance(router, Router):
                    router.register_forward_hook(partial(self._watch, router))

    def take(self) -> int:
        """Returns the number of such tokens since the last call."""
        count, self._count = self._count, 0
        return count

    def _watch(self, router: Router, module: nn.Module, inputs: Any, choice: ExpertChoice) -> None:
        with torch.no_grad():
            is_sigmoid = router.rule.scoring == "sigmoid"
            weights_TE = choice.scores_TE.sigmoid() if is_sigmoid else choice.probabilities_TE
            nudged_TE = weights_TE * (1 + ROUNDING)
            lowered_TK = weights_TE.gather(-1, choice.chosen_TK) * (1 - ROUNDING)
            again_TK = router.choose(nudged_TE.scatter(-1, choice.chosen_TK, lowered_TK))[1]
        differs_TK = again_TK.sort(dim=-1).values != choice.chosen_TK.sort(dim=-1).values
        self._count += int(differs_TK.any(dim=-1).sum())
