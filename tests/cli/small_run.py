"""The configuration of a small run for tests of `tk train`."""

CONFIG = """
[model]
vocab_size = 303
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 64
[data]
sources = [{{path = "{corpus}/tokens"}}]
tokenizer = "{corpus}/tokenizer"
[train]
steps = 3
global_batch_size = 4
micro_batch_size = 2
seq_len = 24
[checkpoint]
dir = "{folder}/{run}"
"""
