"""The file that `tk init` writes: a configuration as TOML in which a comment explains every key."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

EXPLANATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model.architecture": "the family of the model; docs/training/configuration.md lists all",
        "model.hidden_size": "numbers that describe a token inside the model; heads have 64 of them each",
        "model.intermediate_size": "width of the MLP in each layer, 8/3 of hidden_size",
        "model.num_hidden_layers": "layers; more of them learn more and take more time",
        "model.num_attention_heads": "must divide hidden_size",
        "model.max_position_embeddings": "the longest text in tokens that the model will be served with",
        "model.init": "the checkpoint to begin with: weights, shape and tokenizer",
        "data.sources": "the token folders that `tk data prepare` makes",
        "data.vocab_size": "tokens of the tokenizer that is trained for it: about the square root of its bytes",
        "data.tokenizer": "the model's tokenizer with a chat template, which goes into the checkpoint",
        "data.packing": "examples stay whole and do not see each other",
        "data.eval_fraction": "share of the tokens that is held out, to measure what was learned",
        "train.steps": "updates of the weights",
        "train.global_batch_size": "rows of each step, over all devices",
        "train.micro_batch_size": "rows that a device computes at once; halve it if memory is short",
        "train.seq_len": "tokens of a row",
        "train.eval_every": "steps between two measurements on what is held out",
        "lora.rank": "the size of the adapter; the model itself stays as it is",
        "lora.alpha": "the adapter counts alpha / rank",
        "optimizer.lr": "largest learning rate; halve it if the loss jumps",
        "optimizer.warmup_steps": "first steps, in which the rate rises to lr",
        "optimizer.weight_decay": "pulls weights to zero; a trained model needs none",
        "precision.params": "number format of the weights: fp32, or bf16 with a copy in fp32 for the optimizer",
        "zero.stage": "1: each GPU keeps a part of the optimizer's state",
        "checkpoint.dir": "the run folder: checkpoints and metrics",
        "checkpoint.every": "steps between two saves; the same command resumes from the newest",
    }
)


def toml_of(values: Mapping[str, Mapping[str, Any]], heading: Sequence[str]) -> str:
    """Returns a configuration as TOML, with a comment at each key.

    Args:
        values: the keys by section.
        heading: the lines of the comment at the top.
    """
    parts = ["".join(f"# {line}\n" for line in heading)]
    for section, keys in values.items():
        lines = {name: f"{name} = {_literal(value)}" for name, value in keys.items()}
        width = max(map(len, lines.values()))
        rows = (f"{line:<{width}}  # {EXPLANATIONS[f'{section}.{name}']}\n" for name, line in lines.items())
        parts.append(f"[{section}]\n" + "".join(rows))
    return "\n".join(parts)


def _literal(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_literal(each)}' for key, each in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)
