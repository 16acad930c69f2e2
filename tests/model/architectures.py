"""The models of the tests: one small random model per architecture and option, made by `transformers`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 101  # no tp divides it
LENGTH = 33


@dataclass(frozen=True)
class Entry:
    """A reference model: its classes, and its config beyond the shape that all models share."""

    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    options: dict[str, Any]

    def make_config(self) -> PreTrainedConfig:
        """Returns the config of the model."""
        sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
        common = {"max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None}
        return self.config(**sizes | common | self.options)

    def make(self, folder: Path) -> PreTrainedModel:
        """Saves the model in `folder`, with random weights, also of norms and biases, and returns it."""
        torch.manual_seed(0)
        model: PreTrainedModel = self.model(self.make_config()).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(0.1 * torch.randn_like(buffer))
        model.save_pretrained(folder)
        return model


_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 96}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
ENTRIES: dict[str, Entry] = {
    "llama3": Entry(LlamaForCausalLM, LlamaConfig, _GROUPED | {"rope_parameters": _LLAMA3}),
    "qwen2": Entry(Qwen2ForCausalLM, Qwen2Config, _GROUPED | {"tie_word_embeddings": True}),
    "qwen2 sliding": Entry(
        Qwen2ForCausalLM,
        Qwen2Config,
        _GROUPED | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2_moe": Entry(
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        _GROUPED
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
        | {"shared_expert_intermediate_size": 48, "rope_parameters": _YARN}
        | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "qwen3": Entry(Qwen3ForCausalLM, Qwen3Config, _GROUPED | {"head_dim": 24, "rope_parameters": _YARN}),
    "mistral": Entry(MistralForCausalLM, MistralConfig, _GROUPED | {"sliding_window": 9}),
    "mixtral": Entry(MixtralForCausalLM, MixtralConfig, _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Entry(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        _GROUPED
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
        | {"norm_topk_prob": True, "head_dim": 24, "tie_word_embeddings": True, "rope_parameters": _YARN},
    ),
    "glm4_moe": Entry(
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        _GROUPED
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4_moe ungrouped": Entry(
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        _GROUPED
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 2}
        | {"norm_topk_prob": False},
    ),
    "gpt2": Entry(GPT2LMHeadModel, GPT2Config, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt2 untied": Entry(GPT2LMHeadModel, GPT2Config, {"n_inner": 96, "tie_word_embeddings": False}),
}
