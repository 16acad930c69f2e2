"""The log of a run: a progress bar and lines of metrics.jsonl on rank 0, and a trace of profiled steps."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch

from ...core.progress import Progress, progress_bar
from ...model.spec import DecoderSpec
from ...parallel.collectives import all_reduce, all_reduce_max
from ...parallel.mesh import Group
from ..config.train_config import TrainConfig
from ..planning.flops import flops_per_token
from ..state.progress import StepResult, TrainState
from .metrics import MetricsFile, memory_bytes, peak_flops
from .run_events import report_evaluation, report_step
from .step_profiler import StepProfiler


def finite(value: float) -> float | None:
    """Returns the value; None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


class StepLog:
    """A context in which steps move a progress bar and leave lines in the metrics file.

    Args:
        config: the run's configuration.
        decoder: the decoder that is trained.
        world: all ranks.
        device: the device that computes.
        dtype: the dtype of parameters.
        metrics: rank 0's file; None on other ranks.
        done: the number of steps that were taken before.
    """

    def __init__(
        self,
        config: TrainConfig,
        decoder: DecoderSpec,
        world: Group,
        device: torch.device,
        dtype: torch.dtype,
        metrics: MetricsFile | None,
        done: int,
    ) -> None:
        self.config = config
        self.device = device
        self.metrics = metrics
        self.done = done
        options = config.train
        self.tokens_per_step = options.global_batch_size * options.seq_len  # computed, whether learned or only read
        self.flops = flops_per_token(decoder, options.seq_len)
        self.dtype = dtype
        self.world = world
        self.minute = -1
        self.peak = 0.0
        self.measure_peak()
        self.profiler = StepProfiler(options, config.run_folder / "logs", world.rank)
        self.bar: Progress | None = None
        self.open = ExitStack()
        self.restart_clock()

    def __enter__(self) -> "StepLog":
        self.profiler.begin(self.done + 1)
        if self.metrics is not None:
            self.bar = self.open.enter_context(progress_bar("train", self.config.train.steps, done=self.done))
        return self

    def __exit__(self, *error: object) -> None:
        self.profiler.finish()
        self.open.close()

    def record(self, state: TrainState, result: StepResult, last: bool) -> None:
        """Counts a step; writes a line for every `log_every` and for the last."""
        self.profiler.begin(state.step + 1)
        self.steps += 1
        self.learned += result.num_tokens
        self.skipped += not result.updated
        seconds = time.perf_counter() - self.since
        rate = self.steps * self.tokens_per_step / seconds
        if self.bar is not None:
            self.bar.advance(1, f"loss {result.loss:.3f}, lr {result.lr:.2e}, {rate:,.0f} tokens/s")
        if not (last or state.step % self.config.train.log_every == 0 or state.step == 1):
            return
        if self.device.type == "cpu":
            self.measure_peak()  # after `seconds` was taken, and before the clock begins anew
        if self.metrics is not None:
            some: dict[str, float | None] = {}
            if self.config.precision.params == "fp16":
                some["loss_scale"] = result.loss_scale
            router_losses = {"balance_loss": result.balance_loss, "z_loss": result.z_loss}
            some |= {name: finite(loss) for name, loss in router_losses.items() if loss}
            _write(
                self.metrics,
                report_step,
                step=state.step,
                loss=finite(result.loss),
                lr=result.lr,
                grad_norm=finite(result.grad_norm),
                tokens=state.tokens,
                tokens_per_second=rate,
                learned_tokens_per_second=self.learned / seconds,
                mfu=min(1.0, self.flops * rate / self.peak),  # above, the machine was busy as its peak was measured
                step_seconds=seconds / self.steps,
                memory_bytes=memory_bytes(self.device),
                skipped_steps=self.skipped,
                **some,
            )
        self.restart_clock()

    def measure_peak(self) -> None:
        """Makes `peak`, of all ranks together in FLOP/s, not older than a minute; every rank calls it.

        The ranks measure in the same call: one that did so alone would be faster, and the others would wait for it.
        """
        own = torch.tensor(int(time.monotonic() // 60), device=self.device)
        minute = int(all_reduce_max(own, self.world))  # clocks of hosts differ
        if minute != self.minute:
            own_peak = peak_flops(self.device, self.dtype, minute)
            total = torch.tensor(own_peak, dtype=torch.float64, device=self.device)
            self.minute, self.peak = minute, float(all_reduce(total, self.world))

    def restart_clock(self) -> None:
        """Begins a new interval, so that saving and evaluating do not count as training time."""
        self.since, self.steps, self.learned, self.skipped = time.perf_counter(), 0, 0, 0

    def record_evaluation(self, step: int, loss: float) -> None:
        """Writes an evaluation's line."""
        if self.metrics is not None:
            perplexity = math.exp(min(loss, 700.0))
            values = {"eval_loss": finite(loss), "eval_perplexity": finite(perplexity)}
            _write(self.metrics, report_evaluation, step=step, **values)
        self.restart_clock()


def _write(
    metrics: MetricsFile, report: Callable[[Mapping[str, float | None]], None], step: int, **values: float | None
) -> None:
    """Writes a line of the metrics file and reports its values."""
    metrics.write(step, **values)
    report({"step": step, **values})
