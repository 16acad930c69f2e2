"""A recorder of graphs that needs no CUDA: it repeats the operations, not the function that called them.

So values that the function has read on the host, or tensors that it has made there anew, are as wrong when it is
repeated as in a graph of CUDA's. Kernels are operations, too: whatever `kernel` wraps is recorded as one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tk.infer.engine.kernels.triton.run.graphs import Replay


class PretendedGraphs:
    """A `Recorder`.

    Attributes:
        num_graphs, num_replays: how many graphs there are, and how often one was repeated.
    """

    def __init__(self) -> None:
        self.num_graphs = self.num_replays = 0
        self._recording: _Recording | None = None

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """See `Recorder`."""
        recording = self._recording = _Recording()
        with recording:
            outputs = run()
        self._recording = None
        self.num_graphs += 1

        def replay() -> None:
            self.num_replays += 1
            for repeat in recording.work:
                repeat()

        return replay, outputs

    def kernels(self, kernels: Any) -> Any:
        """Returns an object of kernels whose methods are recorded, each as one operation."""
        return _Launched(self, kernels)

    def launch(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Runs a kernel, and records it while a graph is."""
        recording = self._recording
        if recording is None:
            return function(*arguments)
        with recording.paused():
            outputs = function(*arguments)
        recording.add(function, arguments, {}, outputs)
        return outputs


class _Launched:
    def __init__(self, graphs: PretendedGraphs, kernels: Any) -> None:
        self._graphs, self._kernels = graphs, kernels

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._kernels, name)
        return lambda *arguments: self._graphs.launch(function, arguments)


class _Recording(TorchDispatchMode):
    """The operations of a graph.

    Attributes:
        work: what repeats each.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[Callable[[], None]] = []
        self._kept: list[Any] = []  # tensors whose memory a graph holds
        self._is_paused = False

    def paused(self) -> "_Pause":
        """Returns a context in which nothing is recorded."""
        return _Pause(self)

    def add(self, function: Callable[..., Any], arguments: Any, keywords: Any, outputs: Any) -> None:
        """Records an operation: repeated, it writes its outputs to where they lie now, unless they are inputs."""
        inputs = [each for each in tree_leaves((arguments, keywords)) if isinstance(each, torch.Tensor)]
        places = {each.untyped_storage().data_ptr() for each in inputs}
        found = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor)]
        self._kept.append((inputs, found))
        is_new = [each.untyped_storage().data_ptr() not in places for each in found]

        def repeat() -> None:
            again = [each for each in tree_leaves(function(*arguments, **keywords)) if isinstance(each, torch.Tensor)]
            for new, old, value in zip(is_new, found, again, strict=True):
                if new:
                    old.copy_(value)

        self.work.append(repeat)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Runs an operation and records it."""
        keywords = keywords or {}
        outputs = function(*arguments, **keywords)
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{function} waits for the device while a graph is captured")
        if not self._is_paused:
            self.add(function, arguments, keywords, outputs)
        return outputs


class _Pause:
    def __init__(self, recording: _Recording) -> None:
        self._recording = recording

    def __enter__(self) -> None:
        self._recording._is_paused = True

    def __exit__(self, *error: object) -> None:
        self._recording._is_paused = False
