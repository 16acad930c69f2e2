"""Tokenizers and chat templates, which turn text into token ids and back. No torch."""
