"""The report of `tk eval`: one measurement in lines, several as a table with the change by each dtype."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..infer.engine.perplexity import Perplexity
from ..infer.engine.request.events import ModelInfo


@dataclass(frozen=True)
class EvalRun:
    """One measurement and the model that it is of."""

    info: ModelInfo
    found: Perplexity


@dataclass(frozen=True)
class EvalReport:
    """The measurements of one data set, the first of which the others are compared with."""

    data: str
    context: int
    stride: int
    runs: tuple[EvalRun, ...]

    def text(self) -> str:
        """Formats the report as lines of text."""
        info, found = self.runs[0].info, self.runs[0].found
        step = f", step {info.step}" if info.step else ""
        lines = [
            f"model       {info.name} ({info.architecture}{step}), tp {info.tp}, kernels {info.kernels}",
            f"data        {self.data}: {len(found.logprobs):,} tokens in {found.num_windows:,} windows of up to "
            f"{self.context}, stride {self.stride}",
        ]
        if len(self.runs) == 1:
            rate = len(found.logprobs) / found.seconds
            lines += [
                f"dtype       {info.dtype}, weights {info.weight_dtype}, KV cache {info.kv_dtype}",
                f"loss        {found.loss:.5f} nats per token",
                f"perplexity  {found.perplexity:.5g}",
                f"speed       {rate:,.0f} tokens/s",
            ]
        else:
            rows = [
                ("dtype", "weights", "KV cache", "loss", "perplexity", "difference", "argmax changed"),
                *map(self._row, self.runs),
            ]
            widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
            lines += ["", *("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """Returns the report as one JSON document."""
        return {
            "data": self.data,
            "context": self.context,
            "stride": self.stride,
            "num_tokens": len(self.runs[0].found.logprobs),
            "num_windows": self.runs[0].found.num_windows,
            "results": [self._result(run) for run in self.runs],
        }

    def _row(self, run: EvalRun) -> tuple[str, ...]:
        base, found = self.runs[0].found, run.found
        info = run.info
        cells = (info.dtype, info.weight_dtype, info.kv_dtype, f"{found.loss:.5f}", f"{found.perplexity:.5g}")
        if found is base:
            return (*cells, "", "")
        changed = found.num_changed(base)
        share = f"{changed:,} of {len(found.greedy):,} ({changed / len(found.greedy):.2%})"
        return (*cells, f"{found.loss - base.loss:+.5f}", share)

    def _result(self, run: EvalRun) -> dict[str, Any]:
        base, found = self.runs[0].found, run.found
        return {
            "dtype": run.info.dtype,
            "weight_dtype": run.info.weight_dtype,
            "kv_dtype": run.info.kv_dtype,
            "loss": found.loss,
            "perplexity": found.perplexity if math.isfinite(found.perplexity) else None,
            "loss_difference": found.loss - base.loss,
            "argmax_changed": found.num_changed(base),
            "seconds": found.seconds,
            "model": asdict(run.info),
        }
