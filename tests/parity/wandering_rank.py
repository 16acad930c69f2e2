"""A rank of the pool that, at tp > 1, sends one token to another expert in step TK_TEST_WANDERS_IN."""

import os

import torch

from tk.parity.rank_loop import Work, serve


def load() -> Work:
    from tk.model.experts.router import Router
    from tk.parity.measure import Measurer
    from tk.train.run.trainer import Trainer
    from tk.train.state.progress import StepResult

    choose, step, wanders = Router.choose, Trainer.step, [False]

    def watched(self: Trainer) -> StepResult:
        current = self.state.step + 1
        wanders[0] = self.mesh.tp.size > 1 and current == int(os.environ["TK_TEST_WANDERS_IN"])
        return step(self)

    def wandering(self: Router, weights_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights_TK, chosen_TK = choose(self, weights_TE)
        if wanders[0]:
            chosen_TK = torch.cat([(chosen_TK[:1] + 1) % weights_TE.shape[1], chosen_TK[1:]])
        return weights_TK, chosen_TK

    Trainer.step = watched  # type: ignore[method-assign]
    Router.choose = wandering  # type: ignore[method-assign]
    return Measurer()


if __name__ == "__main__":
    serve(load)
