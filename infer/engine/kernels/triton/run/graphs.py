"""The capture of CUDA graphs, behind a seam at which tests put a recorder of their own."""

from collections.abc import Callable
from typing import Protocol

import torch

Replay = Callable[[], object]


class Recorder(Protocol):
    """What records work of the device, to repeat it at the same addresses with the values that lie there then."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """Runs a function and records its work.

        Returns:
            What repeats the work, and the output, whose values each repetition overwrites.
        """


class RepeatedRuns:
    """A recorder for Triton's interpreter, which has no graphs: it runs the function again."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """See `Recorder`."""
        output = run()
        return lambda: output.copy_(run()), output


class CudaGraphs:
    """A recorder of CUDA graphs, which share one pool of memory, as no two of them run at the same time.

    All are captured on one stream: cuBLAS keeps memory of its own, up to 32 MiB, for each stream that it has seen.
    """

    def __init__(self) -> None:
        self._pool, self._beside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """Captures a function after it has run once, which compiles kernels and makes the libraries' handles."""
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            run()
        torch.cuda.current_stream().wait_stream(self._beside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile, such as the one that loads adapters.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._beside, capture_error_mode="thread_local"):
            output = run()
        return graph.replay, output
