"""One rank's model in training: modules over flat buckets, the exchange of gradients, AdamW on the rank's shards.

`Trainer` calls it from a pipeline schedule, `initialize` from a user's own loop. Both call it at the begin and the end
of each pass; between these calls, hooks do the work.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...core.errors import ConfigError, TkError
from ...core.home_process import HomeProcess
from ...core.tensors import Table
from ...parallel.mesh import Group, Mesh
from ...parallel.torch_dtypes import torch_dtype
from ..config.sections import RESIDENT, OffloadSection, OptimizerSection, PrecisionSection
from ..config.tensor_slots import with_run_slots
from ..zero.agreement import Act, Agreement
from ..zero.flat_buffers import Fill, FlatBuffers
from ..zero.gradient_exchange import GradientExchange
from ..zero.parameter_gather import ParameterGather, Unit, leave_to_python
from ..zero.saved_activations import SavedActivations
from ..zero.sharded_adamw import ShardedAdamW
from ..zero.states.open_states import StatePlaces
from .loss_scale import LossScale


@dataclass(frozen=True)
class TrainingOptions:
    """The options of an engine.

    Attributes:
        optimizer, precision: sections of the configuration.
        sequence_parallel, overlap: see GradientExchange.
        offload: the parts of the model states, and the activations, that leave the device.
        folder: the folder of states on disk, if `offload` names none.
        seed: the seed of the random bits that round bf16 moments.
    """

    optimizer: OptimizerSection
    precision: PrecisionSection
    sequence_parallel: bool = False
    overlap: bool = True
    offload: OffloadSection = RESIDENT
    folder: Path = Path()
    seed: int = 0


def _ensuring(optimizer: ShardedAdamW, buckets: Sequence[int]) -> Callable[[torch.nn.Module, Any], None]:
    """Returns a hook before forward, which waits for the update of buckets."""

    def hook(module: torch.nn.Module, inputs: Any) -> None:
        leave_to_python()
        for index in buckets:
            optimizer.ensure(index)

    return hook


class TrainingEngine:
    """Buffers, exchange and optimizer of one rank.

    Args:
        modules: the modules of this rank's stages.
        table: the model's tensors.
        mesh: the rank's groups.
        options: sections of the configuration, and what the run adds to them.
        device: the device of all buffers.
        fill: writes the first values of a parameter.

    Attributes:
        table: the tensors with their slots in this run.
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
        self.home = HomeProcess("This training engine")
        self.mesh = mesh
        self.table = with_run_slots(table, options.precision.params, options.optimizer)
        self.device = device
        dtype = torch_dtype(options.precision.params)
        places = StatePlaces(device, options.offload, options.folder)
        self.buffers = FlatBuffers(tuple(modules), self.table, mesh, dtype=dtype, places=places, fill=fill)
        self.exchange = GradientExchange(
            self.buffers, sequence_parallel=options.sequence_parallel, overlap=options.overlap
        )
        self.optimizer = ShardedAdamW(self.buffers, options.optimizer, places, options.seed)
        self.loss_scale = LossScale.of(options.precision)
        moves = options.offload.activations != "none"
        self.activations = SavedActivations(device, self._lasting(modules)) if moves else None
        self.gathers: list[ParameterGather] = []
        self.agreement: Agreement | None = None
        self._whole = 0
        self._is_cleared = True

    def _lasting(self, modules: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
        """Yields tensors that are on the device all the time, or at ZeRO stage 3 while a module computes with them."""
        yield from (bucket.params for bucket in self.buffers.all_buckets)
        yield from (self.buffers.unsharded_tensor(local) for local in self.buffers.unsharded)
        for module in modules:
            yield from module.buffers()

    def gather_around(self, units: Sequence[Sequence[Unit]], *, prefetch: bool) -> None:
        """Starts to gather parameters at ZeRO stage 3; `units` of each stage in forward order (see ParameterGather)."""
        self.gathers = [
            ParameterGather(self.buffers, stage, prefetch=prefetch, chain=True, updates=self.optimizer)
            for stage in units
        ]
        self.exchange.on_complete = [gather.on_bucket_complete for gather in self.gathers]

    def gather_by_agreement(self, units: Sequence[Unit], group: Group, *, prefetch: bool) -> None:
        """Starts to gather parameters at ZeRO stage 3, for a module that may call its units in any order.

        Args:
            units: the units of the module's one stage.
            group: the shard group, for messages between CPUs.
            prefetch: whether the next unit is gathered while one computes.
        """
        names = [unit.name for unit in units]
        self.agreement = Agreement(group, names, self.exchange.num_complete, self.exchange.start_exchanges)
        gather = ParameterGather(
            self.buffers,
            units,
            prefetch=prefetch,
            chain=False,
            agreement=self.agreement,
            updates=self.optimizer,
        )
        self.gathers = [gather]
        self.exchange.on_complete = [gather.on_bucket_complete for gather in self.gathers]
        self.exchange.by_agreement = True

    def update_behind(self, waits: Sequence[tuple[Sequence[torch.nn.Module], Sequence[int]]]) -> None:
        """Makes updates go on while the next step begins.

        Args:
            waits: modules, and the indices of the buckets that hold parameters of theirs; each module waits for these
                before its forward pass.
        """
        self._wait_in_forward(waits)
        self.optimizer.behind = True

    def gather_behind(self, waits: Sequence[tuple[Sequence[torch.nn.Module], Sequence[int]]]) -> None:
        """Makes the gathers of updated parameters go on while the next step begins; for `waits` see `update_behind`."""
        self._wait_in_forward(waits)
        self.optimizer.leaves_gathers = True

    def _wait_in_forward(self, waits: Sequence[tuple[Sequence[torch.nn.Module], Sequence[int]]]) -> None:
        for modules, buckets in waits:
            for module in modules:
                module.register_forward_pre_hook(_ensuring(self.optimizer, buckets))

    def begin_step(self) -> None:
        """Begins a step; the gradients of the step before are cleared once nothing reads them."""
        self.exchange.begin_step()
        self._is_cleared = False

    def _clear(self) -> None:
        """Clears the gradients of the step before, which its update may still read."""
        if not self._is_cleared:
            self.optimizer.finish()
            self.buffers.zero_grads()
            self._is_cleared = True

    def begin_backward(self, stage: int, *, last: bool, complete: bool = True) -> None:
        """Prepares for a backward pass.

        Args:
            stage: the index of the stage on this rank.
            last: whether the pass is the stage's last one of the step.
            complete: whether the pass computes all gradients of its micro-batch; False if some are deferred.
        """
        self._clear()
        if last:
            self.optimizer.read_ahead()
        if self.gathers:
            self.gathers[stage].begin_backward()
        if complete:
            self.exchange.begin_backward(last)

    @contextmanager
    def saving(self, stage: int, received: torch.Tensor | None = None) -> Iterator[None]:
        """Surrounds a forward pass, or a part of it: what autograd keeps of it goes to where activations are.

        Args:
            stage: the index of the stage on this rank.
            received: a tensor that nothing but the pass reads, so that its memory can be freed after it.
        """
        if self.activations is None or not torch.is_grad_enabled():
            yield
            return
        with self.activations.hooks(self.gathers[stage].saved if self.gathers else None):
            yield
        if received is not None:
            self.activations.free(received)

    def end_pass(self, stage: int) -> None:
        """Frees gathered parameters after a forward or backward pass of `stage`."""
        if self.gathers:
            self.gathers[stage].end_pass()

    def gradients_arrived(self, stage: int, *, last: bool) -> None:
        """Exchanges gradients after those of one micro-batch are complete; `last`: those of the step's last one."""
        self._clear()
        self.exchange.end_backward(stage, last)

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Surrounds a pass of a foreign module, from its begin to its end."""
        try:
            with ExitStack() as stack:
                for gather in self.gathers:
                    stack.enter_context(gather.saved.hooks())
                yield
        except Exception:
            with suppress(
                TkError, RuntimeError
            ):  # the other ranks learn that this one stopped; the first error gives the cause
                self.end_pass(0)
            raise
        self.end_pass(0)

    def meet_for_update(self) -> None:
        """Waits, if ranks gather by agreement, until all are at the optimizer step; then sums late gradients.

        Raises:
            TkError: another rank still gathers parameters.
        """
        if self.agreement:
            self.agreement.synchronize(Act.UPDATE)
        self.exchange.sum_late()

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Holds every parameter whole inside the block; changes of parameters persist. Every rank enters it."""
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
        self.optimizer.publish()

    def outdate_graphs(self) -> None:
        """Called after parameters changed: makes autograd refuse backward through graphs from before, as in torch.

        At stage 3 it frees what was gathered before, too.
        """
        for gather in self.gathers:
            gather.free_all()
            gather.saved.version += 1
        if not self.gathers:
            increment_version([parameter for bucket in self.buffers.buckets for parameter in bucket.parameters])

    def refuse_while_whole(self, call: str) -> None:
        """Raises ConfigError inside `whole_parameters`, where parameters would keep the values from before `call`."""
        if self._whole:
            raise ConfigError(f"{call} was called inside `with engine.full_parameters():`. Leave that block first.")

    def parameters_one_by_one(self) -> Iterator[torch.nn.Parameter]:
        """Yields, at ZeRO stage 3, every sharded parameter while its unit is whole; every rank runs it to its end."""
        for gather in self.gathers:
            for unit in gather.each_unit():
                for bucket in unit.buckets:
                    yield from bucket.parameters

    def finish_backward(self) -> torch.Tensor:
        """Waits for every exchange of gradients.

        Returns:
            This rank's share of the squared gradient norm, without the loss scale; an fp64 scalar. The sum over all
            ranks is the squared norm.
        """
        self.exchange.finish()
        return self.buffers.owned_grad_square_sum() / self.loss_scale.value**2

    def update(self, lr: float, grad_norm: float) -> None:
        """Makes one optimizer step, with gradients clipped to the norm `optimizer.grad_clip`."""
        limit = self.optimizer.options.grad_clip
        clip = min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
        self.optimizer.step(lr, clip / self.loss_scale.value)
