"""How much quality each format of weights and of the KV cache costs: perplexity on a real model, with the promises.

Windows are measured in rounds, in which each case gets the same ones; results stay in a file, so that a run that was
ended goes on where it was. llama.cpp runs in an environment of its own, made on first use (peers/environments.py).
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from tk.benchmarks.peers.environments import BUILD, peer_environment, python_if_possible
from tk.benchmarks.quality.cases import CASES, COPIES, GIVEN, QualityCase
from tk.benchmarks.quality.results import QualityResults, WindowLoss
from tk.benchmarks.quality.text import windows_of, write_text
from tk.infer import LLM
from tk.text.tokenizer import Tokenizer

PATIENCE: Final = 86400.0  # seconds for a step: on a busy machine nothing is dead yet
Windows = dict[int, list[int]]  # the tokens of each window by number; all but the first token are scored


@dataclass(frozen=True)
class QualityMeasurer:
    """Measures cases and keeps the results.

    Attributes:
        models: the folders of the models.
        python: the interpreter of llama.cpp's environment; None if it could not be installed.
        threads: the threads of each contestant.
        results: gets a line for each case and window.
    """

    models: Mapping[str, Path]
    python: Path | None
    threads: int
    results: QualityResults

    def rounds(self, cases: Sequence[QualityCase], windows: Sequence[list[int]], size: int) -> None:
        """Measures what is missing, `size` windows at a time, and prints a line for each case of such a round."""
        numbered = list(enumerate(windows))
        for first in range(0, len(numbered), size):
            for case in cases:
                found = {i: each for i, each in numbered[first : first + size] if not self.results.has(case.name, i)}
                if found and (self.python or not case.peer):
                    (self.by_peer if case.peer else self.by_tk)(case, found)
                    click.echo(self.results.line(case))

    def by_tk(self, case: QualityCase, windows: Windows) -> None:
        """Measures windows of a case by tk."""
        longest = max(map(len, windows.values()))
        options: dict[str, Any] = {"threads": self.threads, "max_model_len": longest, "step_timeout": PATIENCE} | dict(
            case.options
        )
        with LLM(self.models[case.model], **options) as llm:
            for number, window in windows.items():
                [score] = llm.score_pairs([(window[:1], window[1:])])
                self._keep(case, number, window, -score.total / (len(window) - 1))

    def by_peer(self, case: QualityCase, windows: Windows) -> None:
        """Measures windows of a case by llama.cpp."""
        model = str(self.models[case.model].absolute())
        command = [str(self.python), "-m", "tk.benchmarks.peers.llamacpp_perplexity", model, case.peer]
        ended = subprocess.run(
            [*command, str(self.threads)],
            check=True,
            env=peer_environment(),
            input=json.dumps(list(windows.values())),
            stdout=subprocess.PIPE,
            text=True,
        )
        for (number, window), loss in zip(windows.items(), json.loads(ended.stdout), strict=True):
            self._keep(case, number, window, loss)

    def _keep(self, case: QualityCase, number: int, window: list[int], loss: float) -> None:
        self.results.add(WindowLoss(case.name, number, len(window) - 1, loss))


@click.command()
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True), help="A trained Llama in bf16, in one file: a folder."
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=BUILD / "bench" / "quality", help="Copies of it, and the results."
)
@click.option("--context", default=2048, show_default=True, help="Tokens of a window.")
@click.option("--prose", default=110_000, show_default=True, help="Characters of English.")
@click.option("--code", default=115_000, show_default=True, help="Characters of Python.")
@click.option(
    "--only", multiple=True, default=("",), help="Measure only cases whose names begin so; repeat it for more."
)
@click.option("--round", "of_a_round", default=4, show_default=True, help="Windows of a round.")
@click.option("--threads", default=1, show_default=True, help="Threads of each contestant.")
def main(
    model: Path | None,
    out: Path,
    context: int,
    prose: int,
    code: int,
    only: tuple[str, ...],
    of_a_round: int,
    threads: int,
) -> None:
    """Print the perplexity of text in every format, and the promises that hold or are missed."""
    if model is None:
        click.echo("Nothing is measured: random weights say nothing about quality; give a trained model (--model).")
        return
    out.mkdir(parents=True, exist_ok=True)
    results = QualityResults(out / "results.jsonl")
    texts = write_text(out / "text.jsonl", prose, code)
    windows = windows_of(texts, Tokenizer.from_folder(model), context)
    cases = [case for case in CASES if case.name.startswith(only)]
    models = {GIVEN: model} | {name: COPIES[name](model, out / name) for name in {one.model for one in cases} - {GIVEN}}
    python = python_if_possible("llamacpp") if any(case.peer for case in cases) else None
    QualityMeasurer(models, python, threads, results).rounds(cases, windows, of_a_round)
    show = partial(print, flush=True)
    for case in cases:
        show(results.line(case))
    for promise in filter(None, map(results.promise, cases)):
        show(promise.line())


if __name__ == "__main__":
    main()
