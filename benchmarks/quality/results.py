"""The results of bench_quality.py: a line for each case and window, kept as they come, and the table of them."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tk.benchmarks.quality.cases import QualityCase
from tk.benchmarks.serving.in_turn import Promise


@dataclass(frozen=True)
class WindowLoss:
    """A measurement of one window.

    Attributes:
        case: the name of the case.
        window: the number of the window.
        num_tokens: the number of scored tokens.
        loss: the mean loss, in nats per token.
    """

    case: str
    window: int
    num_tokens: int
    loss: float


class QualityResults:
    """The measurements in a file of JSON lines, which another run goes on with.

    Args:
        path: the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._found = {(one.case, one.window): one for one in (WindowLoss(**json.loads(line)) for line in lines)}

    def add(self, loss: WindowLoss) -> None:
        """Keeps a measurement."""
        self._found[loss.case, loss.window] = loss
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(loss)) + "\n")

    def has(self, case: str, window: int) -> bool:
        """Returns whether a window was measured."""
        return (case, window) in self._found

    def line(self, case: QualityCase) -> str:
        """Formats a case: tokens, perplexity, and the difference from another case over the windows that both have.

        The difference has its standard error, from the differences of windows.
        """
        windows = self._windows(case.name)
        if not windows:
            return f"{case.name:<26} not measured"
        count, perplexity = (
            sum(one.num_tokens for one in windows),
            self._perplexity(case.name, set(self._of(case.name))),
        )
        line = f"{case.name:<26} {count:>7,} tokens  perplexity {perplexity:.4f}"
        if not case.beside or not self._shared(case):
            return line
        weights, differences = self._differences(case)
        mean = float(weights @ differences)
        error = math.sqrt(float(weights**2 @ (differences - mean) ** 2))
        return f"{line}  {math.expm1(mean):+.3%} (+-{error:.3%}) beside {case.beside}"

    def promise(self, case: QualityCase) -> Promise | None:
        """Returns the promise about a case, if there is one and both cases were measured."""
        if case.most is None or not self._shared(case):
            return None
        weights, differences = self._differences(case)
        ratio = math.exp(float(weights @ differences))
        return Promise(f"perplexity of {case.name} beside {case.beside}", ratio, case.most, most=True)

    def _of(self, name: str) -> dict[int, WindowLoss]:
        return {window: one for (case, window), one in self._found.items() if case == name}

    def _windows(self, name: str) -> list[WindowLoss]:
        return list(self._of(name).values())

    def _shared(self, case: QualityCase) -> list[int]:
        return sorted(self._of(case.name).keys() & self._of(case.beside).keys())

    def _differences(self, case: QualityCase) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Returns each shared window's share of the tokens, and by how much its loss is larger than beside it."""
        own, other, windows = self._of(case.name), self._of(case.beside), self._shared(case)
        sizes = np.array([own[window].num_tokens for window in windows], np.float64)
        return sizes / sizes.sum(), np.array([own[window].loss - other[window].loss for window in windows])

    def _perplexity(self, name: str, windows: set[int]) -> float:
        chosen = [one for window, one in self._of(name).items() if window in windows]
        return math.exp(sum(one.loss * one.num_tokens for one in chosen) / sum(one.num_tokens for one in chosen))
