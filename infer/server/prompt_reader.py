"""The tokens of prompts: texts are tokenized, and conversations rendered, beside the event loop."""

import asyncio
from functools import cached_property
from typing import Any

from ...core.errors import CheckpointError, ConfigError, InvalidRequest
from ...proto.v1 import generation_pb2 as pb
from ...text.chat_renderer import ChatRenderer
from ..requests.prompts import check_num_messages
from .engine_protocol import ServedEngine, ServedTokenizer
from .errors import NoChatTemplate, NoTokenizer
from .requests import check_text


class PromptReader:
    """Converts the prompts of requests to token ids; only the event loop's thread uses it."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    @property
    def tokenizer(self) -> ServedTokenizer:
        """The tokenizer of the served checkpoint.

        Raises:
            NoTokenizer: it has none.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise NoTokenizer("The served checkpoint has no tokenizer.json; send and read token ids instead of text.")
        return tokenizer

    async def of_text(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text.

        Raises:
            NoTokenizer: the checkpoint has no tokenizer.
            PromptTooLong: no tokens of the model's length can hold the text.
        """
        tokenizer = self.tokenizer
        check_text(text, tokenizer.longest_token_bytes, self._engine.info)
        return await asyncio.to_thread(tokenizer.encode, text, special_tokens=special_tokens)

    async def of_chat(self, chat: pb.Chat) -> list[int]:
        """Returns the tokens of a conversation up to the start of the answer, by the checkpoint's chat template.

        Raises:
            NoTokenizer: the checkpoint has no tokenizer.
            NoChatTemplate: it has no chat template, or a damaged one.
            InvalidRequest: there are no messages or too many, the template refuses them, or takes too long for them.
            PromptTooLong: the prompt has more text than tokens of the model's length can hold.
        """
        check_num_messages(len(chat.messages))
        messages: list[dict[str, Any]] = [{"role": each.role, "content": each.content} for each in chat.messages]
        longest = self._engine.info.max_model_len * self.tokenizer.longest_token_bytes
        try:
            text = await asyncio.wrap_future(self._renderer.submit(messages, longest))
        except CheckpointError as error:
            raise NoChatTemplate(
                "The served checkpoint has no chat template that can be used; send text or token ids."
            ) from error
        except ConfigError as error:
            raise InvalidRequest(f"chat.messages cannot be served: {error}.", field="chat.messages") from error
        return await self.of_text(text, special_tokens=False)  # the template spells them out

    async def close(self) -> None:
        """Ends the process that renders conversations."""
        if "_renderer" in vars(self):
            await asyncio.to_thread(self._renderer.close)

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer.folder)
