"""The names that other trainers give to what a key of the configuration sets, for the error of an unknown key."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_DEVICE: Final = "ranks compute on the GPUs that CUDA_VISIBLE_DEVICES leaves them, and on CPUs if there are none"
_ACCUMULATION: Final = (
    "the micro-batches of a step follow from train.global_batch_size / (dp x train.micro_batch_size): leave it out"
)
# Name -> the key, or a sentence if there is none.
OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "accumulate_grad_batches": _ACCUMULATION,
        "backend": _DEVICE,
        "batch_size": "train.global_batch_size",
        "bf16": "precision.params",
        "block_size": "train.seq_len",
        "context_length": "train.seq_len",
        "device": _DEVICE,
        "dtype": "precision.params",
        "epochs": "train.steps",
        "fp16": "precision.params",
        "gradient_accumulation_steps": _ACCUMULATION,
        "gradient_checkpointing": "recompute.mode",
        "learning_rate": "optimizer.lr",
        "max_seq_len": "train.seq_len",
        "max_seq_length": "train.seq_len",
        "max_steps": "train.steps",
        "num_epochs": "train.steps",
        "num_train_epochs": "train.steps",
        "output_dir": "checkpoint.dir",
        "per_device_train_batch_size": "train.micro_batch_size",
        "save_steps": "checkpoint.every",
        "sequence_length": "train.seq_len",
        "train_iters": "train.steps",
    }
)
