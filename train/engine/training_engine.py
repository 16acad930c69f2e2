"""One rank's model in training: its modules over flat buckets, gradients exchanged, AdamW on what this rank owns.

`Trainer` drives it through a pipeline schedule; `initialize` hands it to a user's own loop. Both tell it where passes
begin and end; everything between is hooks.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch

from ...core.errors import ConfigError, TkError
from ...core.tensors import Table
from ...parallel.mesh import Group, Mesh
from ...parallel.torch_dtypes import torch_dtype
from ..config.sections import OptimizerSection, PrecisionSection
from ..zero.agreement import Act, Agreement
from ..zero.flat_buffers import Fill, FlatBuffers
from ..zero.gradient_exchange import GradientExchange
from ..zero.parameter_gather import ParameterGather, Unit
from ..zero.sharded_adamw import ShardedAdamW
from .loss_scale import LossScale


@dataclass(frozen=True)
class TrainingOptions:
    """How an engine trains.

    Attributes:
        sequence_parallel, overlap: see GradientExchange.
    """

    optimizer: OptimizerSection
    precision: PrecisionSection
    sequence_parallel: bool = False
    overlap: bool = True


class TrainingEngine:
    """Buffers, exchange and optimizer of one rank.

    Args:
        modules: one per stage of this rank.
        fill: gives every parameter its first values.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        table: Table,
        mesh: Mesh,
        options: TrainingOptions,
        *,
        device: torch.device,
        fill: Fill,
    ) -> None:
        self.mesh = mesh
        self.table = table
        self.device = device
        dtype = torch_dtype(options.precision.params)
        self.buffers = FlatBuffers(tuple(modules), table, mesh, dtype=dtype, device=device, fill=fill)
        self.exchange = GradientExchange(
            self.buffers, sequence_parallel=options.sequence_parallel, overlap=options.overlap
        )
        self.optimizer = ShardedAdamW(self.buffers, options.optimizer)
        self.loss_scale = LossScale.of(options.precision)
        self.gathers: list[ParameterGather] = []
        self.agreement: Agreement | None = None
        self._whole = 0

    def gather_around(self, units: Sequence[Sequence[Unit]], *, prefetch: bool) -> None:
        """At ZeRO stage 3: the units of each stage, in forward order (see ParameterGather)."""
        self.gathers = [ParameterGather(self.buffers, stage, prefetch=prefetch, chain=True) for stage in units]
        self.exchange.on_complete = [gather.on_bucket_complete for gather in self.gathers]

    def gather_by_agreement(self, units: Sequence[Unit], group: Group, *, prefetch: bool) -> None:
        """At ZeRO stage 3, for the one stage of a module that calls its units as it likes.

        Args:
            group: the shard group, for messages between CPUs.
        """
        names = [unit.name for unit in units]
        self.agreement = Agreement(group, names, self.exchange.num_complete, self.exchange.start_exchanges)
        self.gathers = [ParameterGather(self.buffers, units, prefetch=prefetch, chain=False, agreement=self.agreement)]
        self.exchange.on_complete = [gather.on_bucket_complete for gather in self.gathers]
        self.exchange.by_agreement = True

    def begin_step(self) -> None:
        """Forgets the gradients of the step before."""
        self.exchange.begin_step()
        self.buffers.zero_grads()

    def begin_backward(self, stage: int, *, last: bool, complete: bool = True) -> None:
        """A backward pass of this rank's `stage` begins: the last one of the step, and one that gives all gradients of
        its micro-batch rather than putting some off."""
        if self.gathers:
            self.gathers[stage].begin_backward()
        if complete:
            self.exchange.begin_backward(last)

    def end_pass(self, stage: int) -> None:
        """A forward or backward pass of `stage` has ended."""
        if self.gathers:
            self.gathers[stage].end_pass()

    def gradients_arrived(self, stage: int, *, last: bool) -> None:
        """All gradients of one micro-batch have arrived, of the step's last if `last`."""
        self.exchange.end_backward(stage, last)

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """A pass of the one stage of a module that is not ours, from its begin to its end."""
        try:
            with ExitStack() as stack:
                for gather in self.gathers:
                    stack.enter_context(gather.saved.hooks())
                yield
        except Exception:
            with suppress(TkError, RuntimeError):  # other ranks are told that this one stopped; its error says why
                self.end_pass(0)
            raise
        self.end_pass(0)

    def meet_for_update(self) -> None:
        """Where ranks gather by agreement, all must be at the optimizer step; then late gradients are summed.

        Raises:
            TkError: another rank still gathers.
        """
        if self.agreement:
            self.agreement.synchronize(Act.UPDATE)
        self.exchange.sum_late()

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Every parameter is whole meanwhile; what is changed of them stays so. Every rank enters it."""
        with ExitStack() as stack:
            for gather in self.gathers:
                stack.enter_context(gather.hold_all())
                stack.enter_context(gather.saved.hooks())
            self._whole += 1
            try:
                yield
            finally:
                self._whole -= 1
            self.optimizer.take_written_values()

    def refuse_while_whole(self, call: str) -> None:
        """Raises ConfigError within `whole_parameters`: what is gathered there would be of the step before."""
        if self._whole:
            raise ConfigError(f"{call} inside `with engine.full_parameters():`; leave it first.")

    def parameters_one_by_one(self) -> Iterator[torch.nn.Parameter]:
        """At ZeRO stage 3 every trainable parameter while its unit is whole; every rank runs it to its end."""
        for gather in self.gathers:
            for unit in gather.each_unit():
                for bucket in unit.buckets:
                    yield from bucket.parameters

    def finish_backward(self) -> torch.Tensor:
        """Waits for every exchange. Returns this rank's share of the squared gradient norm, fp64 scalar, unscaled: its
        sum over the world is the whole."""
        self.exchange.finish()
        square_sum = self.buffers.owned_grad_square_sum() / self.mesh.replicate.size
        return square_sum / self.loss_scale.value**2

    def update(self, lr: float, grad_norm: float) -> None:
        """One optimizer step with the gradients clipped to `optimizer.grad_clip`."""
        limit = self.optimizer.options.grad_clip
        clip = min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
        self.optimizer.step(lr, clip / self.loss_scale.value)
