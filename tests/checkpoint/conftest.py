"""Fixtures of the checkpoint room."""

import pytest

from tk.core.tensors import TensorSpec
from tk.tests.checkpoint.saving import llama_table


@pytest.fixture
def table() -> tuple[TensorSpec, ...]:
    """A small Llama with tied embeddings."""
    return llama_table()
