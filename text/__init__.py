"""Tokenizers and chat templates: between text and token ids. No torch."""
