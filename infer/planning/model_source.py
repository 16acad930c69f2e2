"""The engine's view of a checkpoint before a worker loads it: shape, tokenizer, dtypes, memory, identity."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ... import __version__
from ...checkpoint import Checkpoint
from ...checkpoint.format.manifest import MANIFEST
from ...core import dtypes
from ...core.console_log import shown_format
from ...core.errors import ConfigError
from ...model.config import ModelConfig
from ...model.stored_config import stored_config
from ...text.tokenizer import Tokenizer
from ...text.tokenizer_files import read_eos_token_ids
from ..constraints.compiler import Grammars
from ..options import EngineOptions
from ..requests.events import ModelInfo
from ..requests.sampling_params import MAX_TOP_LOGPROBS
from .job import Job, threads_per_rank
from .memory_plan import MemoryPlan, on_gpus, plan_memory

API_REVISION: Final = 6  # the revision of tk.v1, raised with every addition to the wire
_TEXT_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)


@dataclass(frozen=True)
class ModelSource:
    """An opened checkpoint and the decisions about serving it.

    Attributes:
        options: the options of the engine.
        checkpoint: the checkpoint.
        config: its model.
        memory: the bytes of each rank.
        tokenizer: its tokenizer; None if it has no tokenizer.json.
        grammars: the grammars of constraints over its vocabulary.
        text_sha256: the SHA-256 of the files that decide how texts become tokens, and which tokens end them.
        info: the description of the model.
    """

    options: EngineOptions
    checkpoint: Checkpoint
    config: ModelConfig
    memory: MemoryPlan
    tokenizer: Tokenizer | None
    grammars: Grammars
    text_sha256: str
    info: ModelInfo

    @staticmethod
    def open(options: EngineOptions) -> "ModelSource":
        """Opens the checkpoint, of which it reads the metadata and checks the small files that were saved with it.

        The workers check every byte of the weights as they load them. `tk verify` checks data that nothing serves, such
        as optimizer states.

        Raises:
            CheckpointError, ConfigError, ParallelError: see `Engine.start`.
        """
        path = options.checkpoint
        # Absolute, because workers may start after a change of the current folder; an address is named as it is.
        checkpoint = Checkpoint.open(path.absolute() if path.exists() else path)
        if checkpoint.folder.has_checksums:
            checkpoint.side_files()  # config and tokenizer, before they are used
        config = stored_config(checkpoint)
        dtype = _stored_dtype(checkpoint) if options.dtype == "auto" else options.dtype
        kv_dtype = dtype if options.kv_dtype == "auto" else options.kv_dtype
        memory = plan_memory(config, options, dtype, kv_dtype)
        has_tokenizer = (checkpoint.path / "tokenizer.json").exists()
        tokenizer = Tokenizer.from_folder(checkpoint.path) if has_tokenizer else None
        eos_token_ids = tokenizer.eos_token_ids if tokenizer else read_eos_token_ids(checkpoint.path)
        names = tuple(options.served_model_names) or (_name(checkpoint),)
        info = ModelInfo(
            name=names[0],
            architecture=config.architecture,
            step=checkpoint.step,
            manifest_sha256=checkpoint.manifest_sha256,
            version=__version__,
            api_revision=API_REVISION,
            tp=options.tp,
            dtype=dtype,
            weight_dtype=memory.weight_dtype,
            kv_dtype=kv_dtype,
            block_size=memory.block_size,
            num_blocks=memory.num_blocks,
            max_model_len=memory.max_model_len,
            max_running=options.max_running,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            vocab_size=config.vocab_size,
            eos_token_ids=tuple(sorted(eos_token_ids)),
            kv_bytes_per_token=memory.kv_bytes_per_token,
            aliases=names[1:],
            created=_created(checkpoint),
        )
        grammars = Grammars(tokenizer, info.vocab_size, info.eos_token_ids)
        text_sha256 = _text_sha256(checkpoint.path)
        return ModelSource(options, checkpoint, config, memory, tokenizer, grammars, text_sha256, info)

    def job(self) -> Job:
        """Returns the job that every worker receives, as that of rank 0."""
        return Job(
            checkpoint=str(self.checkpoint.path),
            kernels=self.options.kernels,
            dtype=self.memory.dtype,
            kv_dtype=self.memory.kv_dtype,
            num_blocks=self.memory.num_blocks,
            kv_bytes=self.memory.kv_bytes,
            block_size=self.memory.block_size,
            max_batched_tokens=self.options.max_batched_tokens,
            tp=self.options.tp,
            threads=threads_per_rank(self.options.tp, self.options.threads),
            fingerprint=self.checkpoint.folder.fingerprint,
            weight_dtype=self.memory.weight_dtype,
            num_copies=self.memory.num_copies,
            on_gpus=on_gpus(self.options),
            log=shown_format(),
        )


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """Returns the name of the dtype of most tensors."""
    codes = Counter(tensor.slots["weight"] for tensor in checkpoint.tensors.values() if "weight" in tensor.slots)
    code = codes.most_common(1)[0][0] if codes else "none"
    names = {dtype.code: dtype.name for dtype in dtypes.COMPUTE_DTYPES}
    if code not in names:
        raise ConfigError(
            f"{checkpoint.path} stores its weights as {code}, which tk cannot serve without a cast; use --dtype "
            f"{' or '.join(dtypes.COMPUTE_NAMES)}."
        )
    return names[code]


def _text_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _TEXT_FILES:
        file = folder / name
        content = file.read_bytes() if file.exists() else b""
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _created(checkpoint: Checkpoint) -> int:
    """Returns the time at which a checkpoint was committed, in seconds since 1970; see `ModelInfo`."""
    folder = checkpoint.folder
    names = (MANIFEST,) if folder.kind == "tk" else tuple(folder.file_sizes())
    return int(max((folder.data_path(name).stat().st_mtime for name in names), default=0.0))


def _name(checkpoint: Checkpoint) -> str:
    """Returns the name of the run for a step of a run, else the name of the folder."""
    folder = checkpoint.path.resolve()
    return folder.parent.name if folder.name.startswith("step-") else folder.name
