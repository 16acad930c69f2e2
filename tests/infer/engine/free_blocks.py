"""The blocks of an engine's cache that no request holds."""

from tk.infer.engine.engine import Engine


def num_free_blocks(engine: Engine) -> int:
    """Returns their number, those of the prefix cache included."""
    load = engine.statistics.load()
    return load.blocks_free + load.blocks_cached
