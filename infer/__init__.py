"""Inference: engine, workers, Python API, gRPC server and client. Only the worker processes import torch."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.async_llm import AsyncLLM as AsyncLLM
    from .api.client import Client as Client
    from .api.llm import LLM as LLM
    from .requests.completion import Choice as Choice
    from .requests.completion import Completion as Completion
    from .requests.sampling_params import SamplingParams as SamplingParams
    from .requests.score import Score as Score

__all__ = ["LLM", "AsyncLLM", "Choice", "Client", "Completion", "SamplingParams", "Score"]

_HOMES = MappingProxyType(
    {
        "AsyncLLM": ".api.async_llm",
        "Choice": ".requests.completion",
        "Client": ".api.client",
        "Completion": ".requests.completion",
        "LLM": ".api.llm",
        "SamplingParams": ".requests.sampling_params",
        "Score": ".requests.score",
    }
)


def __getattr__(name: str) -> Any:
    """Imports the module of a public name when it is first used (PEP 562): the client needs no engine."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
