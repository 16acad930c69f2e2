"""The engine's view of a checkpoint before a worker loads it: shape, tokenizer, dtypes, memory, identity.

The same for another step of a served model, which is loaded beside the running one.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from .... import __version__
from ....checkpoint import Checkpoint
from ....checkpoint.format.manifest import MANIFEST
from ....core import dtypes
from ....core.console_log import shown_form
from ....core.errors import ConfigError
from ....core.given_paths import as_path
from ....core.machine_memory import free_memory
from ....core.progress import format_bytes
from ....model.config import ModelConfig
from ....model.stored_config import stored_config
from ....text.tokenizer import Tokenizer
from ....text.tokenizer_files import TOKENIZER_FILE, TextFiles, eos_token_ids_of
from ..grammar.compiler import Grammars
from ..job import Job
from ..options import EngineOptions
from ..request.events import ModelInfo
from ..request.sampling_params import MAX_TOP_LOGPROBS
from .adapter_source import AdapterSource, with_room
from .draft import check_same_tokens, draft_options
from .memory_plan import MemoryPlan, plan_memory
from .placement import on_gpus

API_REVISION: Final = 8  # the revision of tk.v1, raised with every addition to the wire


@dataclass(frozen=True)
class ModelSource:
    """An opened checkpoint and the decisions about serving it.

    Attributes:
        options: the options of the engine.
        config: its model.
        memory: the bytes of each rank.
        tokenizer: its tokenizer; None if it has no tokenizer.json.
        grammars: the grammars of constraints over its vocabulary.
        text_digests: the SHA-256 of each file that decides how texts become tokens, and which tokens end them.
        info: the description of the model.
        adapters: the adapters that are loaded at start, by name.
        draft: the draft model, which another process computes; None without one.
    """

    options: EngineOptions
    checkpoint: Checkpoint
    config: ModelConfig
    memory: MemoryPlan
    tokenizer: Tokenizer | None
    grammars: Grammars
    text_digests: Mapping[str, str]
    info: ModelInfo
    adapters: Mapping[str, AdapterSource] = field(default_factory=dict)
    draft: "ModelSource | None" = None

    @staticmethod
    def open(options: EngineOptions, beside: "ModelSource | None" = None) -> "ModelSource":
        """Opens the checkpoint, of which it reads the metadata and checks the small files that were saved with it.

        What texts depend on is read once and held: nothing that happens to the folder later changes an answer. The
        workers check every byte of the weights as they load them. `tk verify` checks data that nothing serves, such as
        optimizer states.

        Raises:
            CheckpointError, ConfigError, ParallelError: see `Engine.start`.
        """
        path = options.checkpoint
        # Absolute, because workers may start after a change of the current folder; an address is named as it is.
        checkpoint = Checkpoint.open(path.absolute() if os.path.exists(path) else path)  # pathlib's raises OSError
        files = _text_files(checkpoint)
        config = stored_config(checkpoint)
        dtype = _stored_dtype(checkpoint) if options.dtype == "auto" else options.dtype
        kv_dtype = dtype if options.kv_dtype == "auto" else options.kv_dtype
        options = with_room(options, config)
        draft = _open_draft(options, files, config)
        memory = plan_memory(config, options, dtype, kv_dtype, None if draft is None else draft.memory)
        digests = _digests(files)
        alike = beside if beside is not None and beside.text_digests == digests else None
        tokenizer = _tokenizer(files) if alike is None else alike.tokenizer
        eos_token_ids = _end_ids(files, tokenizer)
        checkpoint.folder.require_unchanged()  # the end tokens are of the same config as the model
        names = tuple(options.served_model_names) or (checkpoint_name(checkpoint.path),)
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
            max_adapters=memory.max_adapters,
            max_adapter_rank=memory.max_adapter_rank,
        )
        grammars = Grammars(tokenizer, info.vocab_size, info.eos_token_ids) if alike is None else alike.grammars
        adapters = {
            name: AdapterSource.open(as_path(each), checkpoint, config, memory)
            for name, each in options.adapters.items()
        }
        draft = None if draft is None or memory.draft is None else replace(draft, memory=memory.draft)
        return ModelSource(options, checkpoint, config, memory, tokenizer, grammars, digests, info, adapters, draft)

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
            threads=self.options.threads_per_rank,
            fingerprint=self.checkpoint.folder.fingerprint,
            weight_dtype=self.memory.weight_dtype,
            num_twins=self.memory.num_twins,
            on_gpus=on_gpus(self.options),
            log=shown_form(),
            adapter_slots=self.memory.adapter_slots,
            max_adapter_rank=self.memory.max_adapter_rank,
            adapts_experts=self.memory.max_adapter_experts > 0,
            max_running=self.options.max_running,
            max_model_len=self.memory.max_model_len,
            numa=self.options.numa,
            batch_invariant=self.options.batch_invariant,
            packed="" if self.options.packed is None else str(as_path(self.options.packed).absolute()),
        )


def open_beside(running: ModelSource, checkpoint: Path, process_ids: Iterable[int]) -> ModelSource:
    """Opens another checkpoint of the running model, with a cache of the same size.

    Args:
        running: the source of the running model.
        checkpoint: a step folder, a run folder (its newest committed step) or a Hugging Face folder.
        process_ids: the running model's workers.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        ConfigError: it is another model, or the memory is too small for both.
    """
    memory = running.memory
    options = replace(
        running.options,
        checkpoint=checkpoint,
        dtype=memory.dtype,
        kv_dtype=memory.kv_dtype,
        kv_blocks=memory.num_blocks,
        kv_memory=None,
        max_model_len=memory.max_model_len,
    )
    source = ModelSource.open(options, running)
    check_same_model(running, source)
    if not on_gpus(options):  # there a cache is committed as a whole, so the plan has counted it
        check_room(running.memory, source.memory, resident_bytes(process_ids), free_memory())
    return source


def check_same_model(running: ModelSource, other: ModelSource) -> None:
    """Raises ConfigError unless two checkpoints differ in weights alone."""
    mine, theirs = running.config.model_dump(), other.config.model_dump()
    differing = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if differing:
        raise ConfigError(
            f"The model of {other.checkpoint.path} differs from the served one in {', '.join(differing)}. Start "
            "another server for it."
        )
    here, there = running.text_digests, other.text_digests
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if running.info.eos_token_ids != other.info.eos_token_ids:
        differing.append("eos_token_id of config.json")
    if differing:
        raise ConfigError(
            f"{', '.join(differing)} of {other.checkpoint.path} differ from the served ones, so texts would become "
            "other tokens or end elsewhere. Start another server for it."
        )


def check_room(running: MemoryPlan, loading: MemoryPlan, resident: int, free: int) -> None:
    """Checks that two sets of weights and caches fit, also when the running one uses all that its plan allows.

    Args:
        running, loading: the two plans.
        resident: the bytes that the running one's workers occupy: pages of a cache are committed as they are used.
        free: the free bytes of this machine.

    Raises:
        ConfigError: they do not fit.
    """
    uncommitted = max(0, running.tp * running.total_bytes - resident)
    needed = loading.tp * loading.total_bytes
    if needed + uncommitted > free:
        raise ConfigError(
            f"A second set of weights and its cache take {format_bytes(needed)}, the running one can grow by "
            f"{format_bytes(uncommitted)}, and this machine has {format_bytes(free)} free. Serve with a smaller "
            "--kv-memory, or start a new server."
        )


def resident_bytes(process_ids: Iterable[int]) -> int:
    """Returns the bytes of memory that processes occupy; one that has ended occupies none."""
    total = 0
    for process in process_ids:
        with suppress(OSError):
            lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    return total


def _open_draft(options: EngineOptions, files: TextFiles, config: ModelConfig) -> ModelSource | None:
    """Opens the draft of an engine whose model has these files; its cache is not planned yet."""
    wanted = draft_options(options)
    if wanted is None:
        return None
    draft = ModelSource.open(wanted)
    check_same_tokens(_text_files(draft.checkpoint), files, (draft.config.vocab_size, config.vocab_size))
    return draft


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


def _text_files(checkpoint: Checkpoint) -> TextFiles:
    """Reads the files that texts depend on, and checks those that the manifest lists, as all others that it lists.

    Raises:
        CheckpointError: one has changed since it was saved, or cannot be read.
    """
    files = TextFiles.read(checkpoint.path)
    if not checkpoint.folder.has_checksums:
        return files
    checked = checkpoint.side_files()
    return TextFiles(files.folder, {name: checked.get(name, content) for name, content in files.contents.items()})


def _tokenizer(files: TextFiles) -> Tokenizer | None:
    return Tokenizer.of(files) if TOKENIZER_FILE in files.contents else None


def _end_ids(files: TextFiles, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Returns the tokens that end a sample: those of the configs, or the tokenizer's own if these name none."""
    named = eos_token_ids_of(files)
    if named or tokenizer is None or tokenizer.eos_token_id is None:
        return named
    return frozenset((tokenizer.eos_token_id,))


def _digests(files: TextFiles) -> dict[str, str]:
    """Returns the digests of the files; config.json has more than texts depend on, and is compared by its values."""
    contents = files.without("config.json").contents
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _created(checkpoint: Checkpoint) -> int:
    """Returns the time at which a checkpoint was committed, in seconds since 1970; see `ModelInfo`."""
    folder = checkpoint.folder
    names = (MANIFEST,) if folder.kind == "tk" else tuple(folder.file_sizes())
    return int(max((folder.data_path(name).stat().st_mtime for name in names), default=0.0))


def checkpoint_name(path: Path) -> str:
    """Returns the name of the run for a step of a run, else the name of the folder."""
    folder = path.resolve()
    return folder.parent.name if folder.name.startswith("step-") else folder.name
