"""The forward and backward passes of a step, over this rank's stages of the pipeline."""

from collections.abc import Sequence

import torch

from ..model.decoder import Decoder
from .data.batches import MicroBatch
from .engine import Engine
from .stages import StagePass


class Passes:
    def __init__(self, decoders: Sequence[Decoder], engine: Engine, config: object) -> None:
        self.engine = engine
        self.stages = [StagePass(decoder, engine.device) for decoder in decoders]

    def train(self, micro_batches: Sequence[MicroBatch], loss_factor: float) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        stage = self.stages[0]
        stage.micro_batches, stage.loss_factor = micro_batches, loss_factor
        for index in range(len(micro_batches)):
            last = index == len(micro_batches) - 1
            loss = stage.forward(index, None)
            total += loss.detach()
            self.engine.end_forward(0)
            self.engine.begin_backward(0, last)
            loss.backward()
            self.engine.end_backward(0, last)
        return total

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        stage = self.stages[0]
        stage.micro_batches, stage.loss_factor = micro_batches, 1.0
        with torch.no_grad():
            for index in range(len(micro_batches)):
                total += stage.forward(index, None)
                self.engine.end_forward(0)
        return total
