"""Decoding with a draft model beside decoding without, on a pair that is trained here on Python's standard library.

The draft reads a small part of the target's bytes. Training takes some 20 minutes of one quiet core. `--likeness` makes
a pair without it, whose draft is the target's first layer. Both engines run each batch in turn. Shown are medians of
the ratios of neighbouring runs, and how often proposals came true. The speed-up that they allow at best is that of
Leviathan et al. (arXiv 2211.17192, theorem 3.8), with the chance a and the cost c of a draft's step as measured here.
The promises about them follow.
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Final

import click

from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload
from tk.benchmarks.random_model import alike_pair
from tk.benchmarks.serving.engines import EngineContestant, engine
from tk.benchmarks.serving.in_turn import Promise
from tk.checkpoint import Checkpoint
from tk.core.cpu import read_cpu
from tk.core.process import module_command
from tk.data.sources import stdlib_corpus
from tk.infer import LLM
from tk.text.tokenizer import Tokenizer

STEPS: Final = MappingProxyType({"draft": 2000, "target": 320})
RATES: Final = MappingProxyType({"draft": 2e-3, "target": 1e-3})
SIZES: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        "draft": {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 2, "num_attention_heads": 5},
        "target": {"hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 10},
    }
)
PROMPT_TOKENS: Final = 128
SHARE_BOUND: Final = 0.15  # of the target's bytes that the draft reads
BEST_BOUND: Final = 0.85  # of the speed-up at best
LIKELY, LIKELY_BOUND = 0.7, 1.4  # the speed-up where the chance is as large
WIDE_BOUND: Final = 0.97  # the speed of wide batches, where drafts do not pay
FIRST_BOUND: Final = 1.2  # times to the first token
CONFIG: Final = """\
[model]
architecture = "llama"
{sizes}
num_key_value_heads = {kv_heads}
max_position_embeddings = 1024
initializer_range = 0.05

[data]
sources = "stdlib"
vocab_size = 2048
cache = "{folder}/cache"

[train]
steps = {steps}
global_batch_size = 4
micro_batch_size = 4
seq_len = 256

[optimizer]
lr = {rate}
warmup_steps = 40
schedule = "cosine"

[precision]
params = "bf16"

[checkpoint]
dir = "{folder}/{name}"
"""


@dataclass(frozen=True)
class Chances:
    """What the draft came to in the runs of a batch: the chance a of a proposal, and the mean number K of them."""

    chance: float
    count: float

    def best_speed(self, cost: float) -> float:
        """Returns the speed-up at best, if a step of the draft takes `cost` of one of the target."""
        a, k = min(self.chance, 0.999), self.count
        return float((1 - a ** (k + 1)) / ((1 - a) * (1 + k * cost)))


def trained(folder: Path, name: str) -> Path:
    """Trains a model of the pair, unless an earlier benchmark did, and returns its run folder."""
    run, config = folder / name, folder / f"{name}.toml"
    if not list(run.glob("step-*")):
        folder.mkdir(parents=True, exist_ok=True)
        sizes = "\n".join(f"{key} = {value}" for key, value in SIZES[name].items())
        kv_heads = max(1, SIZES[name]["num_attention_heads"] // 4)
        values = {"kv_heads": kv_heads, "steps": STEPS[name], "rate": RATES[name], "name": name}
        config.write_text(CONFIG.format(sizes=sizes, folder=folder, **values))
        subprocess.run([*module_command("tk"), "train", str(config)], check=True)
    return run


def text_prompt(model: Path) -> list[int]:
    """Returns the beginning of a source, as the model reads it."""
    text = next(text for text in stdlib_corpus().texts() if len(text) > 4000)
    return Tokenizer.from_folder(Checkpoint.open(model).path).encode(text[:4000])[:PROMPT_TOKENS]


def chances_of(llm: LLM, before: Mapping[str, int]) -> Chances:
    """Returns the chances since earlier counts of an engine.

    Of K proposals, of which each comes true with chance a after the one before, a + a^2 + ... + a^K come true.
    """
    proposed, accepted, steps = (now - before[name] for name, now in counts(llm).items())
    if not proposed:
        return Chances(0.0, 0.0)
    count, low, high = proposed / max(1, steps), 0.0, 1.0
    for _ in range(40):
        a = (low + high) / 2
        expected = sum(a**i * min(1.0, count - i + 1) for i in range(1, int(count + 0.999) + 1))
        low, high = (a, high) if expected < accepted / max(1, steps) else (low, a)
    return Chances(low, count)


def counts(llm: LLM) -> dict[str, int]:
    """Returns the numbers of proposals, of those that came true, and of the samples' steps that had some."""
    totals = llm.engine.statistics.totals()
    return {
        "proposed": totals.proposed["draft"],
        "accepted": totals.accepted["draft"],
        "steps": totals.new_tokens - totals.accepted["draft"],
    }


@dataclass(frozen=True)
class DraftFigures:
    """The figures of one batch at one temperature.

    Attributes:
        plain: tokens per second without a draft.
        speed, first: the speed of decoding and the time to the first token beside those without.
        seen: what proposals came to.
        cost: the time of a step of the draft, as a part of the target's.
    """

    batch: int
    temperature: float
    plain: float
    speed: float
    first: float
    seen: Chances
    cost: float

    def line(self) -> str:
        """Returns the row of the table."""
        best = self.seen.best_speed(self.cost)
        return (
            f"| {self.batch} | {self.temperature:g} | {self.plain:.0f} | {self.speed:.2f} | {self.first:.2f} | "
            f"{self.seen.chance:.2f} | {self.seen.count:.1f} | {self.cost:.2f} | {best:.2f} | {self.speed / best:.2f} |"
        )

    def promises(self) -> list[Promise]:
        """Returns the promises about these figures."""
        where = f"at batch {self.batch}, temperature {self.temperature:g}"
        found = [Promise(f"time to the first token beside that without {where}", self.first, FIRST_BOUND, most=True)]
        if self.seen.count:
            part = self.speed / self.seen.best_speed(self.cost)
            found.append(Promise(f"part of the speed-up at best {where}", part, BEST_BOUND))
        if self.batch > 1:
            found.append(Promise(f"speed beside that without {where}", self.speed, WIDE_BOUND))
        elif self.seen.chance >= LIKELY:
            found.append(Promise(f"speed beside that without {where}", self.speed, LIKELY_BOUND))
        return found


def measured(
    with_draft: LLM, without: LLM, prompt: list[int], batch: int, new: int, temperature: float, runs: int
) -> DraftFigures:
    """Measures one batch at one temperature."""
    workload = SpeedWorkload(batch, PROMPT_TOKENS, new)
    pair = [
        EngineContestant(name, llm, prompt, temperature=temperature, seed=7)
        for name, llm in (("draft", with_draft), ("plain", without))
    ]
    for one in pair:
        one.run(workload)
    before, found = counts(with_draft), list[dict[str, Speeds]]()
    for number in range(runs):
        order = pair if number % 2 else pair[::-1]
        found.append({one.name: one.run(workload) for one in order})
    speed, first = (
        median(each["draft"][kind] / each["plain"][kind] for each in found) for kind in ("decode", "prefill")
    )
    seen, draft = chances_of(with_draft, before), with_draft.engine.draft
    assert draft is not None, "it has one"
    plain = median(each["plain"]["decode"] for each in found)
    return DraftFigures(batch, temperature, plain, speed, 1 / first, seen, draft.policy.cost(batch))


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".build/bench/draft"), show_default=True)
@click.option("--likeness", type=float, help="Of a pair that is not trained: 10 for a draft that is often right.")
@click.option("--speculate", default=4, show_default=True)
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8, 32), show_default=True)
@click.option("--temperature", "temperatures", type=float, multiple=True, default=(0.0, 0.7), show_default=True)
@click.option("--new-tokens", default=96, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--runs", default=7, show_default=True)
def main(
    folder: Path,
    likeness: float | None,
    speculate: int,
    batches: tuple[int, ...],
    temperatures: tuple[float, ...],
    new_tokens: int,
    threads: int,
    runs: int,
) -> None:
    """Print a table in Markdown: the speed with a draft beside without, and the time to the first token; promises."""
    if likeness is None:
        large, small = trained(folder, "target"), trained(folder, "draft")
    else:
        large, small = alike_pair(folder, likeness)
    cpu = read_cpu()
    print(f"{cpu.model}, {', '.join(cpu.instruction_sets)}; {threads} threads, {runs} pairs of runs, K = {speculate}")
    options = {"threads": threads, "max_model_len": PROMPT_TOKENS + new_tokens + 1}
    with (
        engine("plain", large, **options) as plain,
        engine("draft", large, draft=small, speculate=speculate, **options) as drafted,
    ):
        memory = drafted.llm.engine.source.memory
        assert memory.draft is not None, "it has one"
        share = memory.draft.weight_bytes / memory.weight_bytes
        promises = [Promise("the draft's part of the target's bytes", share, SHARE_BOUND, most=True)]
        print("| batch | temperature | tokens/s without | with | first token | a | K | c | best | of it |", flush=True)
        print("|---|---|---|---|---|---|---|---|---|---|")
        prompt = list(range(3, 3 + PROMPT_TOKENS)) if likeness is not None else text_prompt(large)
        for batch in batches:
            for temperature in temperatures:
                row = measured(drafted.llm, plain.llm, prompt, batch, new_tokens, temperature, runs)
                print(row.line(), flush=True)
                promises += row.promises()
    print("\n" + "\n".join(promise.line() for promise in promises))


if __name__ == "__main__":
    sys.exit(main())
