"""torchtitan's Llama in the shape of the benchmarks, where torchtitan 0.3 is installed."""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tk.benchmarks.gpu_model import CUDA, LENGTH, SHAPE, VOCAB_SIZE


def titan_model(device: torch.device = CUDA) -> Any:
    """Returns the model with fp32 parameters, whose layers are compiled one by one, as torchtitan does it."""
    parts = [import_module(f"torchtitan.models.{name}") for name in ("common", "common.config_utils", "llama3.model")]
    common, helpers, llama = parts
    sdpa = import_module("torchtitan.models.common.attention").ScaledDotProductAttention.Config
    dim, heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"]
    matrix, ones = {"weight": partial(nn.init.normal_, std=0.02)}, {"weight": nn.init.ones_}
    norm = partial(common.RMSNorm.Config, normalized_shape=dim, param_init=ones)

    def layer() -> Any:
        rope = common.ComplexRoPE.Config(dim=dim // heads, max_seq_len=LENGTH, theta=10000.0)
        attention = helpers.make_gqa_config(
            dim=dim,
            n_heads=heads,
            n_kv_heads=SHAPE["num_key_value_heads"],
            wqkv_param_init=matrix,
            wo_param_init=matrix,
            inner_attention=sdpa(),
            rope=rope,
            fuse_qkv=True,
        )
        block = helpers.make_ffn_config(
            dim=dim, hidden_dim=SHAPE["intermediate_size"], w1_param_init=matrix, w2w3_param_init=matrix
        )
        return llama.Llama3TransformerBlock.Config(
            attention_norm=norm(), ffn_norm=norm(), attention=attention, feed_forward=block
        )

    embedding = common.Embedding.Config(num_embeddings=VOCAB_SIZE, embedding_dim=dim, param_init=matrix)
    head = common.Linear.Config(in_features=dim, out_features=VOCAB_SIZE, param_init=matrix)
    layers = [layer() for _ in range(SHAPE["num_hidden_layers"])]
    config = llama.Llama3Model.Config(
        dim=dim, vocab_size=VOCAB_SIZE, tok_embeddings=embedding, norm=norm(), lm_head=head, layers=layers
    )
    with device:
        model = config.build()
    model.init_states(buffer_device=device)
    for each in model.layers.values():
        each.compile(fullgraph=True)
    return model
