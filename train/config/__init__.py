"""The configuration of a run: its sections and keys, DeepSpeed's JSON, freezing, and the initial model."""
