"""Small random models of many architectures, made by `transformers`: those that tk does not run."""

from typing import Any

import torch

VOCAB = 97
_NARROW = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_ENCODER = _NARROW | {"intermediate_size": 24, "max_position_embeddings": 32}
_DECODER = _ENCODER | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_TOWERS = {
    "text_config": _ENCODER | {"projection_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": _VISION | {"projection_dim": 8},
}
_GPT = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "rotary_dim": 4}

_DEEPSEEK = _DECODER | {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}

# Class -> its config, and which inputs it takes.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "BertForMaskedLM": (_ENCODER, "text"),
    "RobertaForMaskedLM": (_ENCODER | {"max_position_embeddings": 40}, "text"),
    "XLMRobertaForMaskedLM": (_ENCODER | {"max_position_embeddings": 40}, "text"),
    "DistilBertForMaskedLM": (
        {"vocab_size": VOCAB, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 32},
        "text",
    ),
    "AlbertForMaskedLM": (_ENCODER | {"embedding_size": 8}, "text"),
    "ElectraForMaskedLM": (_ENCODER | {"embedding_size": 8}, "text"),
    "DebertaForMaskedLM": (_ENCODER, "text"),
    "DebertaV2ForMaskedLM": (_ENCODER, "text"),
    "XLNetLMHeadModel": ({"vocab_size": VOCAB, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}, "text"),
    "T5ForConditionalGeneration": (_T5, "pair"),
    "MT5ForConditionalGeneration": (_T5, "pair"),
    "BartForConditionalGeneration": (_SEQ2SEQ, "pair"),
    "MBartForConditionalGeneration": (_SEQ2SEQ, "pair"),
    "PegasusForConditionalGeneration": (_SEQ2SEQ, "pair"),
    "MarianMTModel": (_SEQ2SEQ, "pair"),
    "ViTForImageClassification": (_VISION, "image"),
    "DeiTForImageClassification": (_VISION, "image"),
    "BeitForImageClassification": (_VISION | {"use_relative_position_bias": True}, "image"),
    "ResNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        "image",
    ),
    "CLIPModel": (_TOWERS | {"projection_dim": 8}, "both"),
    "SiglipModel": (_TOWERS, "both"),
    "WhisperForConditionalGeneration": (
        _SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        "mel",
    ),
    "Wav2Vec2ForCTC": (
        _ENCODER
        | {
            "conv_dim": [8, 8],
            "conv_kernel": [10, 8],
            "conv_stride": [5, 4],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_feat_extract_layers": 2,
        },
        "sound",
    ),
    "GPTNeoXForCausalLM": (_DECODER, "text"),
    "GPTJForCausalLM": (_GPT, "text"),
    "CodeGenForCausalLM": (_GPT | {"n_head": 4}, "text"),
    "OPTForCausalLM": (_ENCODER | {"ffn_dim": 24, "word_embed_proj_dim": 16, "pad_token_id": 0}, "text"),
    "BloomForCausalLM": ({"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2}, "text"),
    "FalconForCausalLM": (_NARROW, "text"),
    "MptForCausalLM": ({"vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}, "text"),
    "PhiForCausalLM": (_DECODER, "text"),
    "GemmaForCausalLM": (_DECODER | {"head_dim": 8}, "text"),
    "Gemma2ForCausalLM": (_DECODER | {"head_dim": 8}, "text"),
    "StableLmForCausalLM": (_DECODER, "text"),
    "CohereForCausalLM": (_DECODER, "text"),
    "OlmoForCausalLM": (_DECODER, "text"),
    "GraniteForCausalLM": (_DECODER, "text"),
    "DeepseekV2ForCausalLM": (_DEEPSEEK | {"n_group": 1}, "text"),
    "DeepseekV3ForCausalLM": (_DEEPSEEK | {"n_group": 2}, "text"),
    "GptOssForCausalLM": (_DECODER | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "text"),
    "MambaForCausalLM": ({"vocab_size": VOCAB, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}, "text"),
    "RwkvForCausalLM": (
        {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "attention_hidden_size": 16,
            "intermediate_size": 24,
        },
        "text",
    ),
}


def make(name: str, **changes: Any) -> Any:
    """A model of that class with the same random weights each time, its config changed."""
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**MODELS[name][0] | changes)).eval()


def outputs(model: Any, kind: str) -> list[torch.Tensor]:
    """Every tensor that a model answers with, for inputs of that kind."""
    draw = torch.Generator().manual_seed(1)
    tokens, image = torch.randint(3, VOCAB, (2, 9), generator=draw), torch.randn(2, 3, 16, 16, generator=draw)
    given = {
        "text": {"input_ids": tokens},
        "pair": {"input_ids": tokens, "decoder_input_ids": tokens[:, :5]},
        "image": {"pixel_values": image},
        "both": {"input_ids": tokens, "pixel_values": image},
        "mel": {"input_features": image[:, 0, :8].repeat(1, 1, 2), "decoder_input_ids": tokens[:, :5]},
        "sound": {"input_values": image.reshape(2, -1)[:, :600]},
    }
    with torch.no_grad():
        found = model(**given[kind])
    return [value for value in found.to_tuple() if isinstance(value, torch.Tensor)]
