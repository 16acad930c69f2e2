"""Inference: engine, workers, Python API, gRPC server and client. Only the worker processes import torch."""

from typing import TYPE_CHECKING

from ..core.public_names import public_names

if TYPE_CHECKING:
    from .client.adapters import AdapterClient as AdapterClient
    from .client.client import AsyncClient as AsyncClient
    from .client.client import Client as Client
    from .client.connection import Credentials as Credentials
    from .engine.async_llm import AsyncLLM as AsyncLLM
    from .engine.llm import LLM as LLM
    from .engine.request.completion import Choice as Choice
    from .engine.request.completion import Completion as Completion
    from .engine.request.prompts import Conversation as Conversation
    from .engine.request.request import CacheOptions as CacheOptions
    from .engine.request.sampling_params import SamplingParams as SamplingParams
    from .engine.request.score import Score as Score
else:
    __all__, __getattr__, __dir__ = public_names(
        __name__,
        {
            "AdapterClient": ".client.adapters",
            "AsyncClient": ".client.client",
            "AsyncLLM": ".engine.async_llm",
            "CacheOptions": ".engine.request.request",
            "Choice": ".engine.request.completion",
            "Client": ".client.client",
            "Credentials": ".client.connection",
            "Completion": ".engine.request.completion",
            "Conversation": ".engine.request.prompts",
            "LLM": ".engine.llm",
            "SamplingParams": ".engine.request.sampling_params",
            "Score": ".engine.request.score",
        },
    )
