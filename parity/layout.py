"""A layout of the comparison: the keys of a training configuration that spread a model over ranks."""

from typing import Any, Literal

from pydantic import Field

from ..core.config import Section
from ..train.config.sections import Tier
from .axes import AXES, OFFLOAD_AXES


class ParityLayout(Section):
    """A layout of the comparison; keys without an entry below are those of a training configuration.

    Attributes:
        zero: the ZeRO stage.
        shard_size: the number of ranks that share one copy of the state; 0 = dp x cp.
        tied: whether embedding and head are one tensor; None = as the model is configured.
        kv_heads: as many kv heads as heads, half as many, or tp / 2; None = as the model is configured.
        mlp_block: the positions that a dense MLP computes at once; 0 = all.
        experts: the architecture whose mixtures of experts the layers have, or "none"; None = as it is configured.
        packing: as in [data]; None = as it is configured.
        window: whether a query sees only a few positions; None = as the model is configured.
        targets: whether all tokens are targets, or those of short answers only; None = as the data are configured.
        seq_len: the positions of a row; None = as it is configured.
        lora: the layers with low-rank adapters, which are then all that is trained; None = as it is configured.
        offload_optimizer, offload_gradients, offload_parameters, offload_activations: the places of these, as in
            [offload].
        foreign: whether the model is a module of torch's layers, which `initialize` trains and torch's AdamW checks,
            instead of a decoder of tk.
    """

    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    cp_mode: Literal["gather", "ulysses"] = "gather"
    ep: int = Field(default=1, ge=1)
    expert_tp: int = Field(default=0, ge=0)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = "1f1b"
    num_virtual_stages: int = Field(default=1, ge=1)
    zero: Literal[0, 1, 2, 3] = 0
    shard_size: int = Field(default=0, ge=0)
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    tied: bool | None = None
    kv_heads: Literal["heads", "fewer", "fewer than tp"] | None = None
    experts: Literal["none", "mixtral", "qwen2_moe", "glm4_moe"] | None = None
    mlp_block: int = Field(default=0, ge=0)
    packing: Literal["concat", "documents"] | None = None
    window: bool | None = None
    targets: Literal["all", "answers"] | None = None
    seq_len: int | None = Field(default=None, ge=2)
    lora: Literal["none", "all-linear"] | None = None
    offload_optimizer: Tier = "none"
    offload_gradients: Tier = "none"
    offload_parameters: Tier = "none"
    offload_activations: Literal["none", "cpu"] = "none"
    foreign: bool = False

    @property
    def num_ranks(self) -> int:
        """The number of processes of the layout."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def offload(self) -> dict[str, Tier]:
        """The places by their keys of [offload]."""
        return {key.removeprefix("offload_"): getattr(self, key) for key in OFFLOAD_AXES}

    def to_json(self) -> dict[str, Any]:
        """Returns the keys as plain data, without the less common ones at their defaults."""
        data = self.model_dump(exclude_none=True)
        for key in ("cp", "cp_mode", "num_virtual_stages", "shard_size", "mlp_block", "foreign", *OFFLOAD_AXES):
            if data[key] == type(self).model_fields[key].default:
                del data[key]
        return data

    def __str__(self) -> str:
        words = [f"tp{self.tp} pp{self.pp} dp{self.dp} zero{self.zero}"]
        words += ["foreign module"] if self.foreign else [self.schedule]
        words += [f"cp{self.cp} {self.cp_mode}"] if self.cp > 1 else []
        words += [f"shard_size {self.shard_size}"] if self.shard_size else []
        words += [f"ep{self.ep}"] if self.ep > 1 else []
        words += [f"expert_tp{self.expert_tp}"] if self.expert_tp else []
        words += ["sp"] if self.sequence_parallel else []
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += ["tied"] if self.tied else []
        words += [self.experts] if self.experts not in (None, "none") else []
        words += [f"mlp_block {self.mlp_block}"] if self.mlp_block else []
        words += ["documents"] if self.packing == "documents" else []
        words += ["window"] if self.window else []
        words += ["answers"] if self.targets == "answers" else []
        words += [f"rows of {self.seq_len}"] if self.seq_len not in (None, AXES["seq_len"].values[0]) else []
        words += ["lora"] if self.lora == "all-linear" else []
        words += [f"{key} on {place}" for key, place in self.offload.items() if place != "none"]
        words += [f"kv {self.kv_heads}"] if self.kv_heads not in (None, "heads") else []
        return " ".join(words)
