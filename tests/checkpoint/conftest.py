"""Makes `saving.py` importable, and the small model at hand."""

import sys
from pathlib import Path

import pytest
from tk.core.layout import TensorSpec

sys.path.insert(0, str(Path(__file__).parent))

from saving import llama_table


@pytest.fixture
def table() -> tuple[TensorSpec, ...]:
    """A small Llama with tied embeddings."""
    return llama_table()
