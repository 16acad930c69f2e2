"""The section of bench_serving.py about constrained output: its cost, and whether answers keep their schemas."""

import json
from types import MappingProxyType
from typing import Any, Final

from tk.benchmarks.peers.token_clock import SpeedWorkload
from tk.benchmarks.serving.engines import EngineContestant, engine
from tk.benchmarks.serving.in_turn import Promise, compared, medians_in_turn
from tk.benchmarks.serving.setup import Setup
from tk.infer import LLM, SamplingParams
from tk.tests.infer.random_schemas import is_accepted, random_schema

BOUNDS: Final = MappingProxyType({"schema": 1.15, "regex": 0.97})  # a schema forces tokens, which take no steps
BATCH: Final = 8
NUM_SCHEMAS: Final = 200
MAX_LENGTH: Final = 512  # tokens
RECORDS: Final[dict[str, Any]] = {
    "type": "array",
    "minItems": 100,  # more than a run has tokens for
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 99999},
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["red", "green", "blue"]},
        },
        "required": ["id", "name", "kind"],
        "additionalProperties": False,
    },
}
WORDS: Final = r"([A-Za-z]{1,12}[ ,.]){500}"


def structured(setup: Setup) -> list[Promise]:
    """Compares decoding under a JSON schema and a regular expression with decoding without; checks 200 schemas."""
    if not (setup.model / "tokenizer.json").exists():
        setup.show("It is left out: the model has no tokenizer.json; give one that has (--model).")
        return []
    with engine("free", setup.model, threads=setup.threads, max_model_len=MAX_LENGTH) as free:
        contestants = [
            EngineContestant("free", free.llm, temperature=1.0),
            EngineContestant("schema", free.llm, temperature=1.0, ignore_eos=False, json_schema=json.dumps(RECORDS)),
            EngineContestant("regex", free.llm, temperature=1.0, ignore_eos=False, regex=WORDS),
        ]
        workload = SpeedWorkload(BATCH, setup.prompt_tokens, setup.new_tokens)
        speeds = medians_in_turn(contestants, workload, setup.runs, setup.show)
        setup.show(f"batch {BATCH:>3} decode   {compared(speeds, 'decode')}")
        promises = [
            Promise(
                f"decode at batch {BATCH} with a {name} beside none",
                speeds[name]["decode"] / speeds["free"]["decode"],
                bound,
            )
            for name, bound in BOUNDS.items()
        ]
        return [*promises, _accepted(free.llm)]


def _accepted(llm: LLM) -> Promise:
    """Asks for a document of each of many random schemas at temperature 1."""
    schemas = [random_schema(seed) for seed in range(NUM_SCHEMAS)]
    params = [SamplingParams(json_schema=json.dumps(schema), seed=i) for i, schema in enumerate(schemas)]
    completions = llm.generate(["Here is an example of such a document:\n"] * NUM_SCHEMAS, params)
    count = sum(is_accepted(one.text, schema) for one, schema in zip(completions, schemas, strict=True))
    return Promise(f"documents of {NUM_SCHEMAS} random schemas that are accepted", count, NUM_SCHEMAS)
