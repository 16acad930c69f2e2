"""The subject of a comparison: a model with its data and optimizer, from which each layout's configuration is made."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ..core.config import parse
from ..core.errors import ConfigError
from ..core.integers import ceil_div
from ..core.local_params import local_params
from ..core.tensors import TensorSpec
from ..data.prepare import prepare_tokens
from ..data.stdlib import prepare_stdlib
from ..data.tokenizer_training import train_byte_level_bpe
from ..train.config.initial_model import resolve
from ..train.config.run_decoder import run_decoder
from ..train.config.sections import OffloadSection, ParallelSection, RecomputeSection, ZeroSection
from ..train.config.train_config import TrainConfig
from ..train.context.modes import AttentionHeads, choose_mode
from ..train.pipeline.schedules import make_schedule
from .axes import AXES, FOREIGN_AXES
from .built_in_data import examples, texts
from .judge import COMPARED_UPDATES
from .layout import ParityLayout

MICRO_BATCHES: Final = 4  # of a foreign module's step, divided among the data-parallel ranks
VOCAB_SIZE: Final = 301  # neither 2 nor 4 divides it
WINDOW: Final = 5  # positions
# With so many experts some of them are without a token in some micro-batches. Their balance weighs enough to show.
MIXTURE: Final = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
MIXTURES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "mixtral": {},
        "qwen2_moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 48},
        "glm4_moe": {"moe_intermediate_size": 16, "partial_rotary_factor": 0.5, "use_qk_norm": True, "n_group": 2},
    }
)
# A step moves the biases of experts by more than their scores differ. So the experts in use move from step to step: to
# one of the two groups, and in some steps to two experts, which all tokens take.
BIAS_RATE: Final = 0.5
# Adapters that are far larger than their weights would measure how a model amplifies rounding: with an alpha of 8 the
# first gradients of nine layers differ by 1.3e-5 in a layout in which they differ by 2.5e-6 with this one.
LORA: Final[Mapping[str, Any]] = MappingProxyType({"rank": 4, "alpha": 2.0})
DROPOUT: Final = 0.1  # of dense models' adapters: those of experts have none
SKIPPED_STEP: Final = 3  # of the built-in model, counted from 1: its gradients are made infinite
# A larger learning rate would measure how training amplifies rounding, not how layouts differ: at 3e-3, changing the
# weights of one process by 6e-8 changes the gradient norm by up to 4e-3 within 50 steps (at 1e-3: by 6e-6).
BUILT_IN: Final = """{
    "model": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "max_position_embeddings": 16},
    "train": {"micro_batch_size": 2, "seq_len": 16, "on_nonfinite": "skip"},
    "optimizer": {"lr": 1e-3, "warmup_steps": 2, "eps": 1e-6, "grad_clip": 0.5},
    "zero": {"bucket_size": 10000},
    "parallel": {"timeout_seconds": 60.0}
}"""


@dataclass(frozen=True)
class Subject:
    """A base configuration, from which each layout's configuration is made.

    Attributes:
        base: the configuration; its layout sections are ignored, and nothing is written to its `checkpoint.dir`.
        varies_model: whether layouts may change the model (tied embeddings, kv heads, more layers for more stages).
    """

    base: TrainConfig
    varies_model: bool = False

    @staticmethod
    def built_in(folder: Path, steps: int, precision: str) -> "Subject":
        """Returns a small Llama with sizes that divide badly, on a corpus that `prepare` makes in `folder`."""
        data = json.loads(BUILT_IN)
        data["data"] = {"sources": [{"path": str(folder / "tokens")}], "tokenizer": str(folder / "tokenizer")}
        data["checkpoint"] = {"dir": str(folder / "run")}
        data["train"]["steps"] = steps
        data["optimizer"]["warmup_steps"] = min(steps, data["optimizer"]["warmup_steps"])
        data["precision"] = {"params": precision}
        return Subject(parse(data, TrainConfig, "tk parity's own configuration"), varies_model=True)

    @property
    def skipped_step(self) -> int:
        """The step, counted from 1, in which a decoder's gradients are made infinite; 0 = none."""
        return SKIPPED_STEP if self.varies_model else 0

    @staticmethod
    def of(config: TrainConfig, steps: int, precision: str | None) -> "Subject":
        """Returns the subject of a user's configuration, with its model and data.

        Raises:
            ConfigError: the model starts from a checkpoint.
        """
        if config.model.init:
            raise ConfigError(
                f"[model] init = {config.model.init!r}: tk parity starts from random weights; set the model's shape "
                "instead of init."
            )
        train = config.train.model_copy(update={"steps": steps})
        warmup = min(steps, config.optimizer.warmup_steps)  # a comparison may be shorter than the run
        optimizer = config.optimizer.model_copy(update={"warmup_steps": warmup})
        params = config.precision.model_copy(update={"params": precision} if precision else {})
        return Subject(config.model_copy(update={"train": train, "optimizer": optimizer, "precision": params}))

    def settings(self) -> dict[str, Any]:
        """Returns everything except the layout that determines the results: the base without its paths."""
        data = self.base.model_dump(mode="json", exclude={"checkpoint": True}) | {"compared_updates": COMPARED_UPDATES}
        return data | ({"data": "built in"} if self.varies_model else {})

    def describe(self) -> str:
        """Returns one or two sentences about the model."""
        model = self.base.model
        if not self.varies_model:
            return f"The model is the configuration's: {model.architecture}, hidden size {model.hidden_size}."
        return (
            f"The model is a Llama of hidden size {model.hidden_size}, {model.num_attention_heads} heads and a "
            f"vocabulary of {VOCAB_SIZE}, or a Mixtral,\nQwen2-MoE or GLM-4.5 with {MIXTURE['num_local_experts']} "
            "experts, with one layer more than stages. All data-parallel ranks together get a\nsingle row for their "
            "last micro-batch of 2. Gradients are clipped in every step; a decoder's are\n"
            f"infinite in step {SKIPPED_STEP}, which is skipped. Where rounding could send a token of one process to "
            "another\nexpert, both runs take another seed. With lora, only adapters of all linear layers are trained, "
            f"rank {LORA['rank']}\nand alpha {LORA['alpha']:g}, both factors random at first, in a dense model with "
            f"dropout {DROPOUT:g}, on a base whose matrices\nmay be in int8 codes. A foreign module, torch's own "
            "layers under `initialize`, is compared with\ntorch's AdamW."
        )

    def prepare(self, folder: Path) -> None:
        """Makes the data, which the ranks only read."""
        if self.varies_model:
            tokenizer = train_byte_level_bpe(iter(texts()), VOCAB_SIZE, folder / "tokenizer")
            prepare_tokens(iter(texts()), tokenizer, folder / "tokens")
            prepare_tokens(iter(examples()), tokenizer, folder / "answers")
        elif self.base.data.sources == "stdlib":
            prepare_stdlib(Path(self.base.data.cache), self.base.data.vocab_size)

    def config(self, layout: ParityLayout) -> TrainConfig:
        """Returns the training configuration of a layout.

        Raises:
            ConfigError: the layout does not fit the model.
        """
        data = self._base_data | {
            "model": self._base_data["model"] | ({} if layout.foreign else self._model(layout)),
            "data": self._base_data["data"] | self._sources(layout),
            "train": self._base_data["train"] | ({} if layout.foreign else self._batch(layout)),
            "lora": self._base_data["lora"] if layout.lora is None else self._lora(layout),
            "parallel": self._base_data["parallel"] | {"num_virtual_stages": layout.num_virtual_stages},
        }
        for axis in AXES.values():
            value = getattr(layout, axis.name)
            if axis.key and value is not None:
                section, key = axis.key.split(".")
                data[section] = data[section] | {key: value}
        return parse(data, TrainConfig, str(layout))

    def reference(self, layout: ParityLayout) -> TrainConfig:
        """Returns the configuration of the run on one process with which a layout is compared."""
        return self.config(layout).model_copy(
            update={
                "parallel": ParallelSection(),
                "zero": ZeroSection(),
                "offload": OffloadSection(),
                "recompute": RecomputeSection(),
            }
        )

    @cached_property
    def _base_data(self) -> dict[str, Any]:
        return self.base.model_dump(mode="json")

    def _batch(self, layout: ParityLayout) -> dict[str, Any]:
        """Returns the global batch size of a layout, and with experts the weight of their routers' z-loss.

        Every data-parallel rank gets at least as many micro-batches of 2 rows as the pipeline has ranks, and at least
        two. All ranks together have a single row in the last micro-batch, which tests a short and an empty one.
        """
        rows = 2 * max(layout.pp, 2 * layout.dp) - (2 * layout.dp - 1)
        routed = {} if layout.experts in (None, "none") else {"router_z_loss_coef": MIXTURE["router_aux_loss_coef"]}
        levels = layout.experts == "glm4_moe" and layout.lora in (None, "none")  # adapters leave the base as it is
        rate = {"router_bias_update_rate": BIAS_RATE} if levels else {}
        return {"global_batch_size": rows} | routed | rate if self.varies_model else {}

    def _lora(self, layout: ParityLayout) -> dict[str, Any] | None:
        if layout.lora == "none":
            return None
        is_dense = layout.experts in (None, "none")
        base = "int8" if layout.lora == "int8 base" else "auto"
        return {**LORA, "base": base, "dropout": DROPOUT if is_dense else 0.0}

    def _sources(self, layout: ParityLayout) -> dict[str, Any]:
        if layout.targets != "answers":
            return {}
        (source,) = self._base_data["data"]["sources"]
        return {"sources": [source | {"path": str(Path(source["path"]).with_name("answers"))}]}

    def _model(self, layout: ParityLayout) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if self.varies_model:
            result["num_hidden_layers"] = layout.pp * layout.num_virtual_stages + 1  # one stage has one layer more
        if layout.experts not in (None, "none"):
            result |= {**MIXTURE, **MIXTURES[layout.experts], "architecture": layout.experts}
        if layout.window:
            result |= {"sliding_window": WINDOW} | ({} if "architecture" in result else {"architecture": "mistral"})
        if layout.tied is not None:
            result["tie_word_embeddings"] = layout.tied
        if layout.kv_heads is not None:
            heads = self.base.model.num_attention_heads
            result["num_key_value_heads"] = {"heads": heads, "fewer": heads // 2}.get(layout.kv_heads, layout.tp // 2)
            if layout.kv_heads == "fewer than tp" and layout.tp == 1:
                raise ConfigError("at tp = 1 a model cannot have fewer kv heads than tp")
        return result

    def check(self, layout: ParityLayout) -> None:
        """Checks a layout as far as possible without starting processes.

        Raises:
            ConfigError, ParallelError: the layout contradicts itself, or does not fit the model or the batch.
        """
        config = self.config(layout)
        plan = config.layout(None)
        if layout.foreign:
            self._check_foreign(layout)
            return
        places = (plan.tp, plan.pp, plan.virtual_stages, plan.ep, plan.experts.tp)
        key = (config.model.model_dump_json(), layout.lora, *places)
        if key not in self._fitting:
            table = self._table(config)
            for pp in range(plan.pp):
                local_params(table, plan, pp * plan.stage_size)
            self._fitting.add(key)
        train, model = config.train, config.model
        heads = AttentionHeads(model.num_attention_heads // plan.tp, model.num_key_value_heads // plan.tp, plan.cp)
        choose_mode(config.parallel.cp_mode, heads, config.recompute.mode)
        num_micro_batches = ceil_div(train.global_batch_size, plan.dp * train.micro_batch_size)
        make_schedule(layout.schedule, plan.pp, plan.virtual_stages, num_micro_batches)

    def _check_foreign(self, layout: ParityLayout) -> None:
        unsupported = layout.model_dump(exclude_defaults=True).keys() - {*FOREIGN_AXES, "foreign"}
        if unsupported:
            raise ConfigError(
                f"a foreign module supports only {', '.join(FOREIGN_AXES)}: leave out {', '.join(sorted(unsupported))}"
            )
        if MICRO_BATCHES % layout.dp:
            raise ConfigError(f"a foreign module has {MICRO_BATCHES} micro-batches: dp = {layout.dp} must divide that")
        if self.base.precision.params != "fp32" or not self.varies_model:
            raise ConfigError("tk parity compares foreign modules only in fp32 and only beside the built-in model")

    @cached_property
    def _fitting(self) -> set[tuple[object, ...]]:
        """Models and the axes that cut them, already found to fit: thousands of layouts share a few of these."""
        return set()

    def _table(self, config: TrainConfig) -> tuple[TensorSpec, ...]:
        vocab_size = VOCAB_SIZE if self.varies_model else config.data.vocab_size
        model = resolve(config, "never").complete(vocab_size, (), config.precision.params)
        return run_decoder(config, model).table
