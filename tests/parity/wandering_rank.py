"""A rank of the pool that, at tp > 1, sends one token to another expert in step TK_TEST_WANDERS_IN."""

import os

import torch

from tk.parity.rank_loop import Work, serve


def load() -> Work:
    from tk.model.experts import MixtureOfExperts
    from tk.parity.measure import Measurer
    from tk.train.run.trainer import Trainer
    from tk.train.state.progress import StepResult

    choose, step, current = MixtureOfExperts._choose, Trainer.step, [0]

    def counted(self: Trainer) -> StepResult:
        current[0] = self.state.step + 1
        return step(self)

    def wandering(self: MixtureOfExperts, probabilities_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights_TK, chosen_TK = choose(self, probabilities_TE)
        if self.tp.size > 1 and current[0] == int(os.environ["TK_TEST_WANDERS_IN"]):
            chosen_TK = torch.cat([(chosen_TK[:1] + 1) % probabilities_TE.shape[1], chosen_TK[1:]])
        return weights_TK, chosen_TK

    Trainer.step = counted  # type: ignore[method-assign]
    MixtureOfExperts._choose = wandering  # type: ignore[method-assign]
    return Measurer()


if __name__ == "__main__":
    serve(load)
