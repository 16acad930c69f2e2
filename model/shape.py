"""A decoder's shape in plain numbers, with the key names of Hugging Face's config.json.

An architecture's file makes its decoder from a `ModelShape`, which is complete. `ModelConfig` checks that the
architecture has the options.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from ..core.config import Section
from ..core.dtypes import COMPUTE_DTYPES
from .rope_scaling import RopeScaling, YarnScaling

FULL: Final = "full_attention"  # the types of layers, as config.json spells them
SLIDING: Final = "sliding_attention"


class ModelKeys(Section):
    """The keys that shape a decoder, with the options of all architectures.

    Attributes:
        vocab_size: the number of tokens; 0 where something else decides it, as the tokenizer of a training run.
        head_dim: the size of a head; 0 for hidden_size / num_attention_heads.
        num_key_value_heads: the number of kv heads; 0 for num_attention_heads.
        eos_token_id: the ids that end a text.
        dtype: the dtype of the stored weights, as config.json spells it.
        rope_scaling: the scaling of rotary embedding for texts beyond the context of pretraining; None without it.
        sliding_window: the number of positions that a query sees, its own included; None for all before it.
        max_window_layers: the number of layers, from the first on, that have no sliding window.
        layer_types: "sliding_attention" for every layer with the sliding window, "full_attention" for the others; empty
            for those that max_window_layers gives.
        moe_intermediate_size: the intermediate size of an expert, if dense layers have another.
        norm_topk_prob: whether the chosen experts' probabilities are scaled to sum to 1.
        decoder_sparse_step: every layer whose number (from 1) it divides has experts, except `mlp_only_layers`.
        mlp_only_layers: the layers without experts.
        shared_expert_intermediate_size: the intermediate size of the expert that every token passes (Qwen2-MoE).
        qkv_bias: whether q, k and v have biases, if the architecture leaves that open (Qwen2-MoE, GLM-4.5).
        use_qk_norm: whether every query and key head passes an RMSNorm (GLM-4.5).
        partial_rotary_factor: the share of a head's dims, from the first, that are rotated (GLM-4.5).
        first_k_dense_replace: the number of layers, from the first on, without experts (GLM-4.5).
        n_shared_experts: the number of experts that every token passes, which are one block (GLM-4.5).
        n_group, topk_group: the groups of experts, and those to which a token's experts belong (GLM-4.5).
        routed_scaling_factor: the factor of the weights of a token's experts (GLM-4.5).
        router_aux_loss_coef: the weight of the routers' load-balancing loss in training (see balance.py).
    """

    architecture: str = "llama"
    vocab_size: int = Field(default=0, ge=0, le=2**28)
    hidden_size: int = Field(default=256, ge=1, le=2**24)
    intermediate_size: int = Field(default=688, ge=1, le=2**24)
    num_hidden_layers: int = Field(default=4, ge=1, le=10_000)
    num_attention_heads: int = Field(default=4, ge=1, le=2**16)
    max_position_embeddings: int = Field(default=2048, ge=1, le=2**31)
    initializer_range: float = Field(default=0.02, gt=0)
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    dtype: str = "float32"

    num_key_value_heads: int = Field(default=0, ge=0)
    head_dim: int = Field(default=0, ge=0, le=2**16)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    sliding_window: int | None = Field(default=None, ge=1)
    max_window_layers: int = Field(default=0, ge=0)
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    num_local_experts: int = Field(default=8, ge=1, le=2**16)
    num_experts_per_tok: int = Field(default=2, ge=1)
    moe_intermediate_size: int = Field(default=768, ge=1)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = Field(default=1, ge=1)
    mlp_only_layers: tuple[int, ...] = ()
    shared_expert_intermediate_size: int = Field(default=768, ge=1)
    qkv_bias: bool = True
    use_qk_norm: bool = False
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    first_k_dense_replace: int = Field(default=1, ge=0)
    n_shared_experts: int = Field(default=1, ge=1)
    n_group: int = Field(default=1, ge=1)
    topk_group: int = Field(default=1, ge=1)
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    router_aux_loss_coef: float = Field(default=0.001, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data  # pydantic's own validation refuses it
        data = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        eos = data.get("eos_token_id")
        if not isinstance(eos, tuple):
            data["eos_token_id"] = () if eos is None else (eos,)
        heads = data.get("num_attention_heads", cls.model_fields["num_attention_heads"].default)
        hidden = data.get("hidden_size", cls.model_fields["hidden_size"].default)
        if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden > 0:
            if _is_unset(data.get("num_key_value_heads")):
                data["num_key_value_heads"] = heads
            if _is_unset(data.get("head_dim")):
                if hidden % heads:
                    raise ValueError(
                        f"num_attention_heads = {heads} must divide hidden_size = {hidden} if head_dim is not set"
                    )
                data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads = {self.num_key_value_heads} must divide num_attention_heads = "
                f"{self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even, since rotary embedding rotates pairs")
        rotated = int(self.head_dim * self.partial_rotary_factor)
        if rotated % 2 or not rotated:
            raise ValueError(
                f"partial_rotary_factor = {self.partial_rotary_factor:g} must rotate an even number of head_dim = "
                f"{self.head_dim} dims, since rotary embedding rotates pairs"
            )
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            raise ValueError(f"rope_theta = {self.rope_theta:g} must be greater than 1 for rope_type = 'yarn'")
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok = {self.num_experts_per_tok} must not exceed num_local_experts = "
                f"{self.num_local_experts}"
            )
        self._check_groups()
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries, and num_hidden_layers = {self.num_hidden_layers}"
            )
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ValueError(f"layer_types has {SLIDING!r}, so sliding_window must be set")
        dtypes = [dtype.torch for dtype in COMPUTE_DTYPES]
        if self.dtype not in dtypes:
            raise ValueError(f"dtype = {self.dtype!r} must be one of {', '.join(dtypes)}")
        return self

    def _check_groups(self) -> None:
        if self.n_group == 1 and self.topk_group == 1:
            return
        size = self.num_local_experts // self.n_group
        if self.num_local_experts % self.n_group or size < 2:
            raise ValueError(f"n_group = {self.n_group} must divide the experts into groups of 2 or more")
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group = {self.topk_group} must not exceed n_group = {self.n_group}")
        if self.num_experts_per_tok > self.topk_group * size:
            raise ValueError(
                f"topk_group = {self.topk_group} groups have {self.topk_group * size} experts, fewer than "
                f"num_experts_per_tok = {self.num_experts_per_tok}"
            )

    @property
    def context_length(self) -> int:
        """The length of the longest text: max_position_embeddings, or more if YaRN extends the context."""
        longest = self.max_position_embeddings
        return self.rope_scaling.context_length(longest) if self.rope_scaling else longest

    @property
    def context_text(self) -> str:
        """The key that bounds texts and its value, for errors."""
        bound = f"max_position_embeddings = {self.max_position_embeddings}"
        more = self.context_length > self.max_position_embeddings
        return f"{bound}, which YaRN extends to {self.context_length}" if more else bound


class ModelShape(ModelKeys):
    """The complete shape of a decoder."""

    vocab_size: int = Field(ge=1, le=2**28)

    @property
    def dtype_name(self) -> str:
        """The stored dtype by its name on the command line: fp32, bf16 or fp16."""
        return next(dtype.name for dtype in COMPUTE_DTYPES if dtype.torch == self.dtype)


def _is_unset(value: object) -> bool:
    return value is None or (value == 0 and not isinstance(value, bool))
