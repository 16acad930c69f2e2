"""The sections of bench_serving.py that compare tk with itself: ranks, sampling and proposals."""

from typing import Final

from tk.benchmarks.peers.environments import BUILD
from tk.benchmarks.peers.token_clock import SpeedWorkload
from tk.benchmarks.random_model import random_model
from tk.benchmarks.serving.engines import EngineContestant, engine
from tk.benchmarks.serving.in_turn import Promise, ratios
from tk.benchmarks.serving.setup import Setup
from tk.core.errors import TkError

RANKS_BOUND: Final = 0.8
LARGE_VOCAB: Final = 128256
# Times the standard deviation of a random model's logits, 0.55: at 16 about two tokens share most of the probability,
# as in a trained model.
PEAKED_SCALE: Final = 16.0
PEAKED_BOUND: Final = 0.95
FLAT_BOUND: Final = 0.9
PROPOSALS: Final = 8
REPETITIVE_BOUND: Final = 1.5
OTHER_BOUND: Final = 0.95
TO_REWRITE: Final = (
    "Write this code again, with the name path changed to file:\n\n"
    "```python\n"
    "def read_rows(path, columns):\n"
    "    rows = []\n"
    "    with open(path) as lines:\n"
    "        for line in lines:\n"
    '            fields = line.rstrip().split(",")\n'
    "            rows.append([fields[column] for column in columns])\n"
    "    return rows\n\n\n"
    "def write_rows(path, rows):\n"
    '    with open(path, "w") as lines:\n'
    "        for row in rows:\n"
    '            lines.write(",".join(row) + "\\n")\n'
    "```\n\n"
    "The new code:\n\n"
    "```python\n"
)
TO_TELL: Final = "A letter to a friend about a walk along the coast, and the weather of that day.\n\nDear Anna,\n"


def ranks(setup: Setup) -> list[Promise]:
    """Compares ranks of one thread with one rank of as many threads."""
    length, count = setup.prompt_tokens + setup.new_tokens, setup.threads
    try:
        with (
            engine(f"tp={count}", setup.model, tp=count, threads=1, max_model_len=length) as many,
            engine("tp=1", setup.model, threads=count, max_model_len=length) as one,
        ):
            return ratios((many, one), setup.workloads(), ("prefill", "decode"), RANKS_BOUND, setup.runs, setup.show)
    except TkError as error:
        setup.show(f"tp={count} is left out: {error}")
        return []


def sampling(setup: Setup) -> list[Promise]:
    """Compares temperature 1 with top_p 0.9 with greedy sampling, with a large vocabulary or that of a given model."""
    folder, vocab = BUILD / "bench", LARGE_VOCAB
    models = {"its own logits": (setup.model, PEAKED_BOUND)}
    if setup.is_random:
        models = {
            "peaked logits": (random_model(folder / "llama-128k-peaked", vocab, PEAKED_SCALE), PEAKED_BOUND),
            "flat logits": (random_model(folder / "llama-128k-flat", vocab), FLAT_BOUND),
        }
    promises = []
    for logits, (model, bound) in models.items():
        with engine("greedy", model, threads=setup.threads, max_model_len=64) as greedy:
            drawn = EngineContestant("temperature 1, top_p 0.9", greedy.llm, temperature=1.0, top_p=0.9)
            setup.show(f"{logits}, vocabulary {greedy.llm.model_info().vocab_size}:")
            short = [SpeedWorkload(batch, 16, 32) for batch in setup.batches]
            where = f" with {logits}"
            promises += ratios((drawn, greedy), short, ("decode",), bound, setup.runs, setup.show, where)
    return promises


def proposals(setup: Setup) -> list[Promise]:
    """Compares an engine that proposes tokens with one that does not, where text repeats and where it does not.

    A given model rewrites code greedily, and writes a letter at temperature 1. Greedy text of the random model soon is
    one token only, and no two of its tokens at temperature 1 come together twice.
    """
    with (
        engine("proposals", setup.model, threads=setup.threads, speculate=PROPOSALS) as many,
        engine("none", setup.model, threads=setup.threads) as none,
    ):
        tokenizer = many.llm.engine.tokenizer
        promises = []
        for text, words, temperature, workloads, bound in (
            (" where text repeats", TO_REWRITE, 0.0, setup.workloads((1,)), REPETITIVE_BOUND),
            (" where it does not", TO_TELL, 1.0, setup.workloads(), OTHER_BOUND),
        ):
            setup.show(f"decoding{text}:")
            prompt = None if tokenizer is None else tokenizer.encode(words)
            pair = [EngineContestant(one.name, one.llm, prompt, temperature=temperature) for one in (many, none)]
            promises += ratios(pair, workloads, ("decode",), bound, setup.runs, setup.show, text)
        return promises
