"""The sampler: logits to tokens and log-probabilities, without torch; in C, and in numpy where there is no compiler."""
