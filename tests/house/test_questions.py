"""Thirty questions of users who come from Megatron, DeepSpeed, vLLM or transformers: a section answers each."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tk.tests.house.pages import sections


class Question(NamedTuple):
    """The section that answers a question.

    Attributes:
        page: the page, below docs/ if it begins so.
        anchor: the section.
        words: regular expressions, in any case, for what the answer must hold.
    """

    page: str
    anchor: str
    words: tuple[str, ...]


QUESTIONS = {
    "How do I resume on another number of GPUs?": Question(
        "docs/training/stopping.md", "resuming", ("layout", "--nproc|number of ranks", "same command|--resume auto")
    ),
    "How large must my disk be?": Question(
        "docs/training/stopping.md", "saves", ("bytes per parameter", "keep", "disk")
    ),
    "How do I stop a run without losing steps?": Question(
        "docs/training/stopping.md", "signals", ("SIGTERM", "saves", "Ctrl-C")
    ),
    "How do I quantize the KV cache?": Question(
        "docs/serving.md", "the-dtype-of-the-cache", ("--kv-dtype", "int8", "bytes|%")
    ),
    "How do I quantize the weights?": Question("docs/serving.md", "quantized-weights", ("--weight-dtype", "int4")),
    "What does quantizing cost in quality?": Question("docs/serving.md", "perplexity", ("tk eval", "--kv-dtype")),
    "Can I serve a GPTQ, AWQ or GGUF model?": Question(
        "docs/troubleshooting.md", "weights-are-quantized", ("GPTQ", "--weight-dtype", "bf16")
    ),
    "How do I serve a model on several ranks?": Question("docs/serving.md", "options", ("--tp",)),
    "How much memory does a run need?": Question(
        "docs/training/planning.md", "", ("tk plan", "memory of a rank", "Bytes per parameter")
    ),
    "My model does not fit. What can I offload?": Question(
        "docs/training/planning.md", "offload", ("--fit", "offload", "disk")
    ),
    "How do I get a Hugging Face folder?": Question("README.md", "commands", ("tk export", "transformers")),
    "How do I train on my own chat rows?": Question(
        "docs/training/data.md", "fine-tuning", ("messages", "chat template", "tk data prepare|init")
    ),
    "How do I train a LoRA adapter?": Question("docs/lora.md", "training-one", (r"\[lora\]", "rank")),
    "How do I serve many adapters of one base?": Question(
        "docs/lora.md", "serving-many", ("--adapter", "--max-adapters|NAME=CKPT")
    ),
    "How do I merge an adapter into its base?": Question("docs/lora.md", "", ("tk export --merge",)),
    "Can I use OpenAI's client?": Question("docs/http.md", "", ("base_url", "/v1/chat/completions", "--http")),
    "How do I get JSON of a schema?": Question(
        "docs/serving.md", "constrained-output", ("json_schema|--json-schema", "regex")
    ),
    "How do I give callers keys?": Question(
        "docs/serving.md", "encryption-and-tokens", ("tk token", "--tokens", "TK_TOKEN")
    ),
    "How do I encrypt the port?": Question("docs/serving.md", "encryption-and-tokens", ("--tls-cert", "--tls-ca")),
    "How do I watch a server with Prometheus?": Question(
        "docs/observability.md", "metrics", ("--metrics-port", "/metrics")
    ),
    "How do I serve newer weights without a restart?": Question(
        "docs/serving.md", "new-weights-without-a-restart", ("--follow", "Reload")
    ),
    "Why do requests wait, and how many can run?": Question(
        "docs/serving.md", "admission", ("--max-running|max_running", "queue|wait")
    ),
    "How do I set gradient accumulation?": Question(
        "docs/training/layouts.md", "", ("gradient accumulation", "global_batch_size", "micro_batch_size")
    ),
    "Can I keep my DeepSpeed JSON?": Question(
        "docs/training/deepspeed.md", "", ("--deepspeed", "ZeRO stage", "offload_optimizer")
    ),
    "How do I run on several nodes, under Slurm?": Question("docs/training/cluster.md", "", ("torchrun", "Slurm|srun")),
    "Which pipeline schedule should I choose?": Question(
        "docs/pipeline.md", "which-schedule", ("1f1b", "zb-h1", "interleaved")
    ),
    "How do I train on rows that are too long for one rank?": Question(
        "docs/training/layouts.md", "context-parallel", (r"\bcp\b", "ulysses|gather")
    ),
    "Does tensor parallelism change the result?": Question(
        "docs/training/layouts.md", "every-layout-gives-the-same-model", ("parity", "losses of one process")
    ),
    "How do I train my own nn.Module?": Question(
        "docs/training/python.md", "any-module-initialize", ("initialize", "backward")
    ),
    "How do I install without a network?": Question("docs/install.md", "without-a-network", ("pip", "wheel|download")),
}


def test_there_are_thirty_questions() -> None:
    assert len(QUESTIONS) == 30


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_section_answers_the_question(question: str, root: Path) -> None:
    page, anchor, words = QUESTIONS[question]
    found = sections(root / page)
    assert anchor in found, f"{page} has {', '.join(found)}"
    missing = [each for each in words if not re.search(each, found[anchor], re.IGNORECASE)]
    assert missing == [], found[anchor]
