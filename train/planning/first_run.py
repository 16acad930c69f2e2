"""The first configuration of a user's run: its sizes follow from the text and the machine (no torch, no processes).

Rules of thumb, plainly written, so that a user can disagree with one number and change it:

- a vocabulary of about the square root of the bytes of text that there is time to read;
- about 20 tokens of training for each parameter (Hoffmann et al., arXiv 2203.15556), and no text more than 8 times:
  up to 4 repetitions are nearly as good as new text (Muennighoff et al., arXiv 2305.16264);
- as much computation as the machine does in the time that is given, in memory that the planner says is there.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from ...core.config import parse
from ...core.errors import ConfigError
from ...core.progress import format_bytes
from ...data.corpus_facts import CorpusFacts
from ..config.train_config import TrainConfig
from .plan import RunPlan, make_plan

MIN_BYTES: Final = 10_000
MIN_VOCAB, MAX_VOCAB = 512, 32768
TOKENS_PER_PARAMETER: Final = 20
MOST_EPOCHS: Final = 8
TUNING_EPOCHS: Final = 3
MIN_STEPS: Final = 100
MIN_TUNING_STEPS: Final = 20
TUNING_ROWS: Final = 8
LONGEST_TUNING_ROW: Final = 512
# The flops per second that training reaches on one of each, low estimates: a core of an EPYC reached 8e10 in bf16 with
# the smallest model, an H100 3e14 with 1.1 B parameters. Small models keep a GPU waiting and reach less.
GPU_RATE, BF16_CORE_RATE, FP32_CORE_RATE = 1e14, 5e10, 2e10
# The share of the memory that tensors may take: the rest is for Python, torch, and what the machine does besides.
USABLE: Final = 0.7

Values = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Budget:
    """The machine that a run is sized for, and the time that it may take.

    Attributes:
        cores: the cores of this machine.
        memory: the bytes of memory of one GPU, or of the machine if it has none.
        num_gpus: the number of GPUs, 0 for a run on cores.
        has_bf16: whether the cores multiply bf16 faster than fp32.
        minutes: how long training may take, roughly.
    """

    cores: int
    memory: int
    num_gpus: int
    has_bf16: bool
    minutes: float

    @property
    def flops(self) -> float:
        """The flops of the whole time."""
        of_cores = self.cores * (BF16_CORE_RATE if self.has_bf16 else FP32_CORE_RATE)
        return (self.num_gpus * GPU_RATE or of_cores) * self.minutes * 60

    @property
    def precision(self) -> str:
        """The dtype of parameters."""
        return "bf16" if self.num_gpus or self.has_bf16 else "fp32"


@dataclass(frozen=True, slots=True)
class FirstRun:
    """A configuration that is ready to be written.

    Attributes:
        values: its keys by section.
        vocab_size: the vocabulary of the tokenizer to train; 0 if the model has one.
        plan: what the run needs, as the planner says.
    """

    values: Values
    vocab_size: int
    plan: RunPlan


class Size(NamedTuple):
    """A size of model that trains well: all heads have 64 dims."""

    hidden: int
    layers: int
    seq_len: int
    rows: int


SIZES: Final = (
    Size(128, 4, 512, 8),
    Size(256, 4, 512, 8),
    Size(384, 6, 512, 8),
    Size(512, 8, 512, 16),
    Size(768, 12, 1024, 32),
    Size(1024, 24, 2048, 64),
    Size(2048, 24, 2048, 128),
)


class Model(NamedTuple):
    """The model that is fine-tuned.

    Attributes:
        init: its checkpoint.
        tokenizer: the folder of a tokenizer that takes the place of its own, "" for none.
        hidden_size, context_length: of its shape.
    """

    init: str
    tokenizer: str
    hidden_size: int
    context_length: int


def vocabulary(num_bytes: int) -> int:
    """Returns a vocabulary for a text: the power of two below the square root of its bytes, 512 to 32,768."""
    return min(MAX_VOCAB, max(MIN_VOCAB, 1 << int(math.log2(max(1, num_bytes)) / 2)))


def _readable(budget: Budget) -> int:
    """Returns the bytes, 3 of each token, that a model of the best size for the time reads in it."""
    return round(3 * math.sqrt(budget.flops / 6 * TOKENS_PER_PARAMETER))


def tokens_of(num_bytes: int, vocab_size: int) -> int:
    """Returns about how many tokens a text has: longer ones in a larger vocabulary, 2.25 bytes in 512 tokens."""
    return round(num_bytes / (math.log2(vocab_size) / 4))


def from_scratch(name: str, text: CorpusFacts, budget: Budget, sources: str | list[dict[str, str]]) -> FirstRun:
    """Returns the largest model that fits into memory, and that the text and the time suffice for; or the smallest one.

    Args:
        name: the run's name.
        sources: `data.sources`; "stdlib" needs no tokenizer.

    Raises:
        ConfigError: the text is too short.
    """
    _check_length(text)
    vocab_size = vocabulary(min(text.num_bytes, _readable(budget)))
    tokens = tokens_of(text.num_bytes, vocab_size)
    found: FirstRun | None = None
    for size in SIZES:
        values = _scratch_values(name, size, tokens, budget)
        values["data"] = {"sources": sources} | ({"vocab_size": vocab_size} if sources == "stdlib" else {})
        values["data"]["eval_fraction"] = _held_out(tokens, values["train"]["seq_len"])
        run = _timed(values, vocab_size, budget, MOST_EPOCHS * tokens, MIN_STEPS)
        if found and not (_is_trained_enough(run.plan) and _needs(run.plan, budget) <= USABLE * budget.memory):
            return found
        found = run
    assert found is not None, "SIZES is not empty"
    return found


def _is_trained_enough(plan: RunPlan) -> bool:
    tokens, parameters = plan.tokens_per_step * plan.steps, plan.flops_per_step / plan.tokens_per_step / 6
    return plan.steps > MIN_STEPS and tokens >= TOKENS_PER_PARAMETER * parameters


def fine_tuning(name: str, text: CorpusFacts, budget: Budget, model: Model, lora: bool) -> FirstRun:
    """Returns a run that continues a model; the whole model if that fits into memory and `lora` is False, else LoRA.

    Args:
        name: the run's name.
        lora: whether an adapter is trained even where the whole model fits.

    Raises:
        ConfigError: the text is too short, or nothing fits into memory.
        CheckpointError: the model cannot be used.
    """
    _check_length(text)
    tokens = text.num_bytes // 4 + 8 * text.num_documents
    needs = []
    for values in _tunings(name, text, budget, model, tokens, lora):
        run = _timed(values, 0, budget, TUNING_EPOCHS * tokens, MIN_TUNING_STEPS)
        needs.append(_needs(run.plan, budget))
        if needs[-1] <= USABLE * budget.memory:
            return run
    raise ConfigError(
        f"To train even an adapter of {model.init} takes {format_bytes(min(needs))} of memory, and "
        f"{format_bytes(USABLE * budget.memory)} can be used of this machine's {format_bytes(budget.memory)}: train a "
        "smaller model, or write the configuration for a larger machine there."
    )


def _check_length(text: CorpusFacts) -> None:
    if text.num_bytes < MIN_BYTES:
        raise ConfigError(
            f"The text has {text.num_bytes:,} bytes, too few to train on and to hold some out: give {MIN_BYTES:,} or "
            "more."
        )


def _scratch_values(name: str, size: Size, tokens: int, budget: Budget) -> Values:
    seq_len = size.seq_len
    while seq_len > 64 and tokens < 64 * seq_len:  # so that there are some rows to learn from and one to hold out
        seq_len //= 2
    return {
        "model": {
            "architecture": "llama",
            "hidden_size": size.hidden,
            "intermediate_size": -(-size.hidden * 8 // 3 // 64) * 64,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.hidden // 64,
            "max_position_embeddings": 2 * size.seq_len,
        },
        "data": {},
        "train": _rows(size.rows, seq_len, budget),
        "optimizer": {"lr": _two_digits(0.384 / size.hidden), "warmup_steps": 0},
        **_rest(name, budget),
    }


def _tunings(name: str, text: CorpusFacts, budget: Budget, model: Model, tokens: int, lora: bool) -> Iterator[Values]:
    """Yields ways to fine-tune a model, those that need less memory later."""
    seq_len = min(model.context_length, LONGEST_TUNING_ROW)
    data: dict[str, Any] = {"sources": [{"path": f"{name}-tokens"}]}
    data |= {"tokenizer": model.tokenizer} if model.tokenizer else {}
    data |= {"packing": "documents"} if text.examples else {}
    data |= {"eval_fraction": 0.1 if text.examples else _held_out(tokens, seq_len)}
    for adapter in (True,) if lora else (False, True):
        lr = 2e-4 if adapter else _two_digits(0.08 / model.hidden_size)
        for micro in (8, 4, 2, 1):
            yield {
                "model": {"init": model.init},
                "data": data,
                "train": _rows(TUNING_ROWS, seq_len, budget) | {"micro_batch_size": micro},
                **({"lora": {"rank": 16, "alpha": 32}} if adapter else {}),
                "optimizer": {"lr": lr, "warmup_steps": 0, "weight_decay": 0.0},
                **_rest(name, budget),
            }


def _rows(rows: int, seq_len: int, budget: Budget) -> dict[str, Any]:
    batch = max(rows, 8 * budget.num_gpus)
    return {"steps": MIN_STEPS, "global_batch_size": batch, "micro_batch_size": 8, "seq_len": seq_len, "eval_every": 0}


def _rest(name: str, budget: Budget) -> Values:
    zero = {"zero": {"stage": 1}} if budget.num_gpus > 1 else {}
    return {"precision": {"params": budget.precision}, **zero, "checkpoint": {"dir": f"runs/{name}", "every": 1}}


def _timed(values: Values, vocab_size: int, budget: Budget, most_tokens: int, least: int) -> FirstRun:
    """Returns a run with the steps that time and text suffice for, and not fewer than `least`."""
    plan = _plan(values, vocab_size, budget)
    by_time, by_text = budget.flops / plan.flops_per_step, most_tokens / plan.tokens_per_step
    steps = max(least, 10 * round(min(by_time, by_text) / 10))
    every = 10 * max(1, steps // 50)
    values["train"] |= {"steps": steps, "eval_every": every}
    values["optimizer"] |= {"warmup_steps": min(100, steps // 10)}
    values["checkpoint"] |= {"every": every}
    return FirstRun(values, vocab_size, replace(plan, steps=steps))


def _plan(values: Values, vocab_size: int, budget: Budget) -> RunPlan:
    """Plans a run whose tokenizer may not exist yet."""
    data = values["data"] | ({"vocab_size": vocab_size} if vocab_size else {})
    config = parse(values | {"data": data}, TrainConfig, "the configuration that tk init writes")
    return make_plan(config, budget.num_gpus or None)


def _needs(plan: RunPlan, budget: Budget) -> int:
    """Returns the bytes that the fullest rank takes."""
    if budget.num_gpus:
        return max(sum(placed.device.values()) for placed in plan.memory)
    return max(plan.cpu_memory)


def _held_out(tokens: int, seq_len: int) -> float:
    """Returns the share to hold out: of a short text two rows, of a long one some 200,000 tokens."""
    return _two_digits(min(0.25, max(2.0 * seq_len / tokens, min(0.05, 200_000 / tokens))))


def _two_digits(number: float) -> float:
    return float(f"{number:.1e}")
