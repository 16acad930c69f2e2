"""The paths of the HTTP port."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final
from urllib.parse import unquote

from ..access.tokens import ADMIN
from ..call.call import ServerCall
from ..errors import UnknownModel
from ..http.messages import HttpRequest, Reply, send_json
from ..http.metrics_port import PATH, metrics_route
from ..http.problems import retry_headers
from ..http.router import HttpRoute
from ..metrics.exposition import MetricsCollector
from ..operations.lifecycle import ServerState
from .asked import read_chat, read_completion
from .choices import ChatDialect, TextDialect
from .completions import Completions
from .page.files import page_routes
from .served import ServedModel

_MODELS: Final = "/v1/models/"  # followed by the name of one


def routes_of(model: ServedModel, metrics: MetricsCollector) -> Mapping[str, HttpRoute]:
    """Returns the routes of a model by their paths."""

    async def health(request: HttpRequest, call: ServerCall, reply: Reply) -> None:
        state = model.state
        is_serving = state is ServerState.SERVING
        headers = () if is_serving else retry_headers(503, model.retry_after)
        await send_json(reply, {"status": state.value}, 200 if is_serving else 503, headers)

    async def models(request: HttpRequest, call: ServerCall, reply: Reply) -> None:
        await send_json(reply, {"object": "list", "data": [_described(model, name) for name in model.info.names]})

    async def one_model(request: HttpRequest, call: ServerCall, reply: Reply) -> None:
        name = unquote(request.path.removeprefix(_MODELS))
        if name not in model.info.names:
            raise UnknownModel(f"The model {name[:200]!r} is not served here.")
        await send_json(reply, _described(model, name))

    async def load(request: HttpRequest, call: ServerCall, reply: Reply) -> None:
        await send_json(reply, {"state": model.state.value, **asdict(model.load)})

    return {
        **page_routes(),
        "/health": HttpRoute(health, role=None),
        # What other callers do is for operators only, here as on the wire.
        "/load": HttpRoute(load, role=ADMIN),
        PATH: metrics_route(metrics, ADMIN),
        "/v1/models": HttpRoute(models),
        _MODELS: HttpRoute(one_model),
        "/v1/completions": HttpRoute(Completions(model, read_completion, TextDialect()), "POST"),
        "/v1/chat/completions": HttpRoute(Completions(model, read_chat, ChatDialect()), "POST"),
    }


def _described(model: ServedModel, name: str) -> dict[str, object]:
    info = model.info
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "tk",
        "max_model_len": info.max_model_len,
        "step": info.step,
        "manifest_sha256": info.manifest_sha256,
        "has_chat_template": model.has_chat_template,
    }
