"""Inference: engine, workers, Python API, gRPC server and client. Only the worker processes import torch."""

from typing import TYPE_CHECKING

from ..core.public_names import public_names

if TYPE_CHECKING:
    from .api.async_client import AsyncClient as AsyncClient
    from .api.async_llm import AsyncLLM as AsyncLLM
    from .api.client import Client as Client
    from .api.credentials import Credentials as Credentials
    from .api.llm import LLM as LLM
    from .requests.completion import Choice as Choice
    from .requests.completion import Completion as Completion
    from .requests.events import CacheOptions as CacheOptions
    from .requests.prompts import Conversation as Conversation
    from .requests.sampling_params import SamplingParams as SamplingParams
    from .requests.score import Score as Score
else:
    __all__, __getattr__, __dir__ = public_names(
        __name__,
        {
            "AsyncClient": ".api.async_client",
            "AsyncLLM": ".api.async_llm",
            "CacheOptions": ".requests.events",
            "Choice": ".requests.completion",
            "Client": ".api.client",
            "Credentials": ".api.credentials",
            "Completion": ".requests.completion",
            "Conversation": ".requests.prompts",
            "LLM": ".api.llm",
            "SamplingParams": ".requests.sampling_params",
            "Score": ".requests.score",
        },
    )
