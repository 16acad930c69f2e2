"""[train] profile: torch's profiler over a few steps, as a trace that chrome://tracing and Perfetto show."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ..config.sections import TrainSection


class StepProfiler:
    """One rank's profiler, which runs during the steps of `train.profile`.

    Args:
        options: the section that names the steps.
        folder: the folder of trace-rank-N.json.
    """

    def __init__(self, options: TrainSection, folder: Path, rank: int) -> None:
        self.path = folder / f"trace-rank-{rank}.json"
        self.steps = options.profiled_steps
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """Starts or ends the trace before step `step`, counted from 1."""
        if self._profile is None and step in self.steps:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._profile.start()
        elif step not in self.steps:
            self.finish()

    def finish(self) -> None:
        """Writes the trace, if one has been started."""
        if self._profile is not None:
            self._profile.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.path))
            self._profile = None
