"""The calls /tokenize, /detokenize and /tokenizer_info, with the fields and answers that vLLM has for them."""

from dataclasses import dataclass
from typing import Any

from ....text.template_files import special_tokens, template_sources
from ...engine.request.prompts import Conversation
from ..call.call import RequestRunner, ServerCall
from ..call.checks import check_model
from ..http.connection import HttpConnection
from ..http.framing import HttpRequest
from ..http.json_body import Fields, parsed
from .chat_messages import take_messages


@dataclass(frozen=True)
class _Asked:
    """What /tokenize is asked for: a text or a conversation; `special_tokens` are the tokenizer's, added to a text."""

    prompt: str | Conversation
    model: str
    special_tokens: bool


class TokenizerCalls:
    """Answers the three calls.

    Args:
        runner: runs the requests of the server, and has its tokenizer.
    """

    def __init__(self, runner: RequestRunner) -> None:
        self._runner = runner

    async def tokenize(self, request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        """Answers with the token ids of a text, or of a conversation as the chat template lays it out."""
        self._runner.lifecycle.check_loaded()
        asked, info = await parsed(request.body, _read_tokenize), self._runner.engine.info
        check_model(asked.model, info)
        if isinstance(asked.prompt, str):
            ids = await self._runner.prompts.of_text(asked.prompt, asked.special_tokens, "prompt")
        else:
            ids = await self._runner.prompts.of_chat(asked.prompt, call.caller.principal)
        count = {"count": len(ids), "max_model_len": info.max_model_len}
        await reply.json({**count, "tokens": ids, "token_strs": None})

    async def detokenize(self, request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        """Answers with the text of token ids, special tokens spelled out."""
        self._runner.lifecycle.check_loaded()
        model, ids = await parsed(request.body, _read_detokenize)
        check_model(model, self._runner.engine.info)
        await reply.json({"prompt": await self._runner.prompts.text_of(ids)})

    async def info(self, request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        """Answers with the tokenizer's special tokens and its chat template."""
        self._runner.lifecycle.check_loaded()
        prompts = self._runner.prompts
        files = prompts.tokenizer.files
        template = template_sources(files).default if prompts.has_chat_template else None
        length = {"max_model_len": self._runner.engine.info.max_model_len}
        await reply.json({**special_tokens(files), **length, "chat_template": template})


def _read_tokenize(body: dict[str, Any]) -> _Asked:
    fields = Fields(body)
    model, adds = fields.text("model") or "", fields.anything("add_special_tokens")
    if not isinstance(adds, bool | None):
        raise fields.wrong("add_special_tokens", adds, "true or false")
    fields.only("return_token_strs", False)
    prompt: str | Conversation | None = fields.text("prompt")
    if "messages" in body:
        if prompt is not None:
            raise fields.wrong("prompt", prompt, "unset beside messages")
        prompt = take_messages(fields)
    if prompt is None:
        raise fields.wrong("prompt", None, "a string, or messages instead")
    fields.refuse_rest()
    return _Asked(prompt, model, adds is not False)


def _read_detokenize(body: dict[str, Any]) -> tuple[str, list[int]]:
    fields = Fields(body)
    model, ids = fields.text("model") or "", fields.integers("tokens")
    fields.refuse_rest()
    return model, ids
