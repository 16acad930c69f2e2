"""The HTTP port of a server, for OpenAI's dialect, and its paths."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final
from urllib.parse import unquote

from ..access.tokens import ADMIN, Caller
from ..call.call import Frontend, RequestRunner, ServerCall
from ..call.checks import unknown_model
from ..http.connection import HttpConnection
from ..http.framing import HttpRequest
from ..http.listener import Listener
from ..http.metrics_port import PATH, metrics_route
from ..http.origins import Origins
from ..http.problems import retry_headers
from ..http.router import HttpRoute, HttpRouter
from ..metrics.exposition import MetricsCollector
from ..operations.lifecycle import ServerState
from ..options import ServerOptions
from .adapter_calls import AdapterCalls
from .completions import Completions
from .dialects import ChatDialect, TextDialect
from .page.files import page_routes
from .tokenizer_calls import TokenizerCalls

_MODELS: Final = "/v1/models/"  # followed by the name of one
# The names of fields in errors, which the log may have.
NAMES: Final = frozenset(
    (
        *("include_usage", "json_schema", "logprobs", "max_completion_tokens", "max_tokens", "messages", "min_tokens"),
        *("name", "prompt", "response_format", "schema", "stream", "stream_options", "strict", "top_logprobs", "type"),
        *("load_inplace", "lora_int_id", "lora_name", "lora_path"),
        *("best_of", "echo", "functions", "suffix", "tool_choice", "tools"),
        *("add_generation_prompt", "add_special_tokens", "cache_salt", "chat_template_kwargs", "tokens"),
        *("continue_final_message", "return_token_strs", "structured_outputs", "choice", "json", "regex", "grammar"),
    )
)


def http_port_of(options: ServerOptions) -> Listener:
    """Returns the HTTP port of a server."""

    def router_of(frontend: Frontend) -> HttpRouter:
        metrics = MetricsCollector(frontend.runner.engine, frontend.statistics)
        routes = routes_of(frontend.runner, metrics, AdapterCalls(frontend.runner, options.adapter_root))
        return HttpRouter(routes, frontend, Origins.of(options))

    place = options.host, options.http_port or 0
    return Listener("HTTP", *place, options.max_connections, router_of, options.certificates, NAMES)


def routes_of(runner: RequestRunner, metrics: MetricsCollector, adapters: AdapterCalls) -> Mapping[str, HttpRoute]:
    """Returns the routes of the served model by their paths."""
    lifecycle, tokenizer = runner.lifecycle, TokenizerCalls(runner)

    async def health(request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        is_serving = lifecycle.state is ServerState.SERVING
        headers = () if is_serving else retry_headers(503, lifecycle.retry_after)
        await reply.json({"status": lifecycle.state.value}, 200 if is_serving else 503, headers)

    async def models(request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        lifecycle.check_loaded()
        await reply.json({"object": "list", "data": list(_models(runner, call.caller).values())})

    async def one_model(request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        lifecycle.check_loaded()
        name = unquote(request.path.removeprefix(_MODELS))
        found = _models(runner, call.caller)
        if name not in found:
            raise unknown_model(name, found)
        await reply.json(found[name])

    async def load(request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        lifecycle.check_loaded()
        await reply.json({"state": lifecycle.state.value, **asdict(runner.engine.statistics.load())})

    return {
        **page_routes(),
        "/health": HttpRoute(health, role=None),
        # What other callers do is for operators only, here as on the wire.
        "/load": HttpRoute(load, role=ADMIN),
        PATH: metrics_route(metrics, ADMIN),
        "/v1/models": HttpRoute(models),
        _MODELS: HttpRoute(one_model),
        "/v1/load_lora_adapter": HttpRoute(adapters.load, "POST", ADMIN),
        "/v1/unload_lora_adapter": HttpRoute(adapters.unload, "POST", ADMIN),
        "/tokenize": HttpRoute(tokenizer.tokenize, "POST"),
        "/detokenize": HttpRoute(tokenizer.detokenize, "POST"),
        "/tokenizer_info": HttpRoute(tokenizer.info),
        "/v1/completions": HttpRoute(Completions(runner, TextDialect()), "POST"),
        "/v1/chat/completions": HttpRoute(Completions(runner, ChatDialect()), "POST"),
    }


def _models(runner: RequestRunner, caller: Caller) -> dict[str, dict[str, object]]:
    """Returns the descriptions of the model by its names, and of the adapters that a caller may use."""
    info = runner.engine.info
    common = {
        "object": "model",
        "created": info.created,
        "owned_by": "tk",
        "max_model_len": info.max_model_len,
        "has_chat_template": runner.prompts.has_chat_template,
    }
    own = {"parent": None, "step": info.step, "manifest_sha256": info.manifest_sha256}
    adapters = {
        each.name: {"id": each.name, **common, "parent": info.name, "step": each.step, "adapter_sha256": each.sha256}
        for each in runner.engine.adapters.infos
        if caller.may_use(each.name)
    }
    names = {name: {"id": name, **common, **own} for name in info.names}
    return names | {name: each for name, each in adapters.items() if name not in names}
