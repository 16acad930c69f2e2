"""The report at the end of `tk demo`: a table of results, and commands to try next."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.progress import format_bytes, format_seconds

if TYPE_CHECKING:
    from ..model.config import ModelConfig


@dataclass(frozen=True)
class Stream:
    """The stream of one prompt, as a client saw it.

    Attributes:
        text: the generated text.
        num_tokens: the number of generated tokens.
        first_token_seconds: the seconds from the request to the first token.
        decode_seconds: the seconds from the first token to the last.
    """

    prompt: str
    text: str
    num_tokens: int
    first_token_seconds: float
    decode_seconds: float


def report(out: Path, reshard_seconds: float, streams: Sequence[Stream], seconds: float) -> str:
    """Returns the report of a demo in folder `out`.

    Args:
        out: the folder of the demo.
        reshard_seconds: the time of the reshard.
        streams: the streams of all prompts.
        seconds: the time of the whole demo.
    """
    rows = _training_rows(out) | _checkpoint_rows(out, reshard_seconds) | _serving_rows(out, streams)
    rows["whole demo"] = format_seconds(seconds)
    width = max(map(len, rows))
    table = "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())
    return f"""\
{table}

Next:
  tk generate {out / "tp1"} 'def main():' --max-new-tokens 60
  tk serve {out / "run"} --tp 2 --kv-dtype int8
  tk export {out / "run"} {out / "hugging-face"}
  tk train {out / "demo.toml"} --set train.steps=700"""


def _training_rows(out: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    held_out = next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line)
    rates = sorted(line["tokens_per_second"] for line in steps[1:])
    return {
        "training loss": f"{steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f} nats per token",
        "held-out loss": f"{held_out:.3f} (unigram entropy {_unigram_entropy(out):.3f})",
        "training speed": f"{rates[len(rates) // 2]:,.0f} tokens/s, {steps[-1]['tokens']:,} tokens",
    }


def _unigram_entropy(out: Path) -> float:
    """Returns the loss, on held-out tokens, of a model that predicts each token by its frequency alone."""
    from ..core.config import load_toml
    from ..data.dataset import PackedDataset
    from ..data.stdlib import prepare_stdlib
    from ..data.unigram import unigram_entropy
    from ..train.config.train_config import TrainConfig

    config = load_toml(out / "demo.toml", TrainConfig)
    tokens = prepare_stdlib(Path(config.data.cache), config.data.vocab_size).tokens
    held_out = PackedDataset([(tokens, 1.0)], config.train.seq_len, 0, "eval", config.data.eval_fraction)
    return unigram_entropy(held_out)


def _checkpoint_rows(out: Path, reshard_seconds: float) -> dict[str, str]:
    from ..checkpoint import Checkpoint
    from ..model.registry import count_parameters, decoder_spec

    trained = Checkpoint.open(out / "run")
    size, resharded = _folder_bytes(trained.path), _folder_bytes(out / "tp1")
    return {
        "parameters": f"{count_parameters(decoder_spec(_model(out))):,}",
        "checkpoint": f"{format_bytes(size)} at tp {trained.layout.tp}, ZeRO-{trained.layout.zero}",
        "resharded": f"{format_bytes(resharded)} at tp 1, in {format_seconds(reshard_seconds)}",
    }


def _serving_rows(out: Path, streams: Sequence[Stream]) -> dict[str, str]:
    from ..infer.engine.options import EngineOptions
    from ..infer.engine.planning.memory_plan import plan_memory

    options = EngineOptions(out / "tp1", kv_blocks=64)
    int8, bf16 = (plan_memory(_model(out), options, "bf16", dtype).kv_bytes_per_token for dtype in ("int8", "bf16"))
    first = sorted(stream.first_token_seconds for stream in streams)[len(streams) // 2]
    rate = sum(stream.num_tokens - 1 for stream in streams) / max(stream.decode_seconds for stream in streams)
    return {
        "first token": format_seconds(first),
        "decode": f"{rate:,.0f} tokens/s over {len(streams)} streams",
        "KV cache": f"{int8} bytes per token in int8, {bf16} in bf16 ({int8 / bf16:.0%})",
    }


def _model(out: Path) -> "ModelConfig":
    from ..model.config import ModelConfig

    return ModelConfig.from_folder(out / "tp1")


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
