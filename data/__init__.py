"""From text to rows of tokens: sources, tokenizer training, token files and the packed rows of a run. No torch."""
