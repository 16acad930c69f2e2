"""The tokens of prompts: texts are tokenized, and conversations rendered, beside the event loop."""

import asyncio
from collections.abc import Sequence
from functools import cached_property

from ....core.errors import CheckpointError, ConfigError, InvalidRequest
from ....text.chat_renderer import ChatRenderer
from ....text.template_files import template_sources
from ....text.tokenizer_files import has_chat_template
from ...engine.request.prompts import Conversation, check_length
from ...engine.request.score import split_tokens
from ..engine_protocol import EngineProtocol, TokenizerProtocol
from ..errors import NoChatTemplate, NoTokenizer
from .checks import check_score_size, check_text, check_text_size


class PromptReader:
    """Converts the prompts of requests to token ids; only the event loop's thread uses it."""

    def __init__(self, engine: EngineProtocol) -> None:
        self._engine = engine

    @property
    def tokenizer(self) -> TokenizerProtocol:
        """The tokenizer of the served checkpoint.

        Raises:
            NoTokenizer: it has none.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise NoTokenizer("The served checkpoint has no tokenizer.json; send and read token ids instead of text.")
        return tokenizer

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether the served checkpoint has a chat template, which may still be a wrong one; it must be loaded."""
        tokenizer = self._engine.tokenizer
        return tokenizer is not None and has_chat_template(tokenizer.files)

    @property
    def longest_token_bytes(self) -> int:
        """The bytes of the longest token; 0 without a tokenizer, which gives no text."""
        tokenizer = self._engine.tokenizer
        return 0 if tokenizer is None else tokenizer.longest_token_bytes

    async def of_text(self, text: str, special_tokens: bool = True, field: str = "text") -> list[int]:
        """Returns the tokens of a text, which is, or comes of, this field of a request.

        Raises:
            NoTokenizer: the checkpoint has no tokenizer.
            PromptTooLong: no tokens of the model's length can hold the text.
        """
        return await asyncio.to_thread(self._encoded, self.tokenizer, text, special_tokens, field)

    def _encoded(self, tokenizer: TokenizerProtocol, text: str, special_tokens: bool, field: str) -> list[int]:
        check_text(text, tokenizer.longest_token_bytes, self._engine.info, field)
        return tokenizer.encode(text, special_tokens=special_tokens)

    async def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens spelled out.

        Raises:
            NoTokenizer: the checkpoint has no tokenizer.
            InvalidRequest: there are more ids than the text of an answer may have.
        """
        tokenizer = self.tokenizer
        check_text_size(len(ids), tokenizer.longest_token_bytes)
        return await asyncio.to_thread(lambda: tokenizer.decode(list(ids), skip_special_tokens=False))

    async def of_chat(self, chat: Conversation, principal: str = "") -> list[int]:
        """Returns the tokens of a conversation up to the start of the answer, by the checkpoint's chat template.

        If this is cancelled, because the caller's deadline has passed for example, the template is stopped.

        Args:
            chat: the conversation.
            principal: the caller, who shares the template's processes with others.

        Raises:
            NoTokenizer: the checkpoint has no tokenizer.
            NoChatTemplate: it has no chat template, or a damaged one.
            InvalidRequest: the template refuses the messages, or takes too long for them.
            PromptTooLong: the prompt has more text than tokens of the model's length can hold.
            WorkerDied: the template's process died or hung, twice.
        """
        longest = self._engine.info.max_model_len * self.tokenizer.longest_token_bytes
        try:
            text = await asyncio.wrap_future(self._renderer.submit(list(chat.messages), longest, principal, chat.form))
        except CheckpointError as error:
            raise NoChatTemplate(
                "The served checkpoint has no chat template that can be used; send text or token ids."
            ) from error
        except ConfigError as error:
            raise InvalidRequest(f"messages cannot be served: {error}.", field="messages") from error
        return await self.of_text(text, special_tokens=False, field="messages")  # the template spells them out

    async def of_score(
        self, prompt: str | Sequence[int], continuation: str | Sequence[int], top: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the tokens of the prompt and of the continuation of a request for a score.

        Args:
            prompt: a text or token ids.
            continuation: a text or token ids.
            top: the number of alternatives to report with each token.

        Raises:
            InvalidRequest: one of them has no tokens, or ids beyond the vocabulary; or the answer could pass the limit
                of a message.
            PromptTooLong: they have together more tokens than the model's length.
            NoTokenizer: one is text, and the checkpoint has no tokenizer.
        """
        info = self._engine.info
        split = await asyncio.to_thread(self._split, prompt, continuation)
        check_length(sum(map(len, split)) - 1, info.max_model_len)
        for side, tokens in zip(("prompt", "continuation"), split, strict=True):
            if max(tokens) >= info.vocab_size:
                raise InvalidRequest(
                    f"Token id {max(tokens)} is not one of the vocabulary's, 0 to {info.vocab_size - 1}.", field=side
                )
        check_score_size(len(split[1]), top, self.longest_token_bytes)
        return split

    def _split(
        self, prompt: str | Sequence[int], continuation: str | Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        before, after = self._given(prompt, "text"), self._given(continuation, "continuation_text")
        return split_tokens(self._engine.tokenizer, before, after)

    def _given(self, value: str | Sequence[int], field: str) -> str | tuple[int, ...]:
        if isinstance(value, str):
            check_text(value, self.tokenizer.longest_token_bytes, self._engine.info, field)
            return value
        if len(value) > self._engine.info.max_model_len:
            check_length(len(value), self._engine.info.max_model_len)
        return tuple(value)

    async def close(self) -> None:
        """Ends the process that renders conversations."""
        if "_renderer" in vars(self):
            await asyncio.to_thread(self._renderer.close)

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(template_sources(self.tokenizer.files))
