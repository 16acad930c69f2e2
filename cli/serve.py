"""`tk serve`: serves a checkpoint over gRPC."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ..core.errors import ConfigError
from .adapter_options import serving_options, with_base
from .common import PATH
from .engine_options import (
    batch_invariant_option,
    draft_option,
    draft_weight_dtype_option,
    dtype_option,
    kernels_option,
    kv_dtype_option,
    kv_memory_option,
    max_model_len_option,
    numa_option,
    packed_option,
    speculate_option,
    threads_option,
    tp_option,
    weight_dtype_option,
)
from .invocation import say

if TYPE_CHECKING:
    from ..infer.engine.engine import Engine
    from ..infer.engine.options import EngineOptions
    from ..infer.engine.planning.memory_plan import MemoryPlan
    from ..infer.engine.request.events import ModelInfo
    from ..infer.engine.worker.processes import WorkerProcesses
    from ..infer.serve.http.listener import Listener
    from ..infer.serve.options import ServerOptions

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 1
LAST_SECONDS: Final = 1.7  # for clean-up after a signal while the model loads, and after the time of a drain
HURRIED_SECONDS: Final = 0.7  # the same after a second signal: for the callers to read that their requests ended
# The options that ServerOptions has by the same name; all others, but for TLS, are the engine's.
_SERVER_VALUES: Final = (
    *("host", "port", "admin_port", "health_port", "http_port", "metrics_port", "metrics_host"),
    *("drain_timeout", "default_max_new_tokens", "tokens", "insecure", "log_prompts", "adapter_root", "cors_origins"),
)


@click.command(
    epilog="\b\nExamples:\n  tk serve runs/demo/run --kv-dtype int8\n"
    "  tk serve models/base --adapter sql=runs/sql --max-adapters 4"
)
@click.argument("checkpoint", metavar="CKPT", type=PATH)
@tp_option
@threads_option
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=50051,
    show_default=True,
    help="Port to listen on; 0: a free one.",
)
@click.option(
    "--admin-port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help="Port of the service Admin alone; 0: a free one. Default: Admin answers on --port.",
)
@click.option(
    "--health-port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help="Port of health alone, never encrypted, for probes that know no TLS; 0: a free one.",
)
@click.option(
    "--metrics-port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help="Port of metrics for Prometheus; 0: a free one.",
)
@click.option(
    "--metrics-host",
    metavar="HOST",
    default="127.0.0.1",
    show_default=True,
    help="Address of --metrics-port; it asks for no token.",
)
@click.option(
    "--http",
    "http_port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help="Port of HTTP in OpenAI's dialect; 0: a free one.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="SITE",
    help="Site whose pages may ask over HTTP, as https://chat.example; may come again. Default: the server's own only.",
)
@dtype_option
@weight_dtype_option
@kv_dtype_option
@numa_option
@kernels_option
@batch_invariant_option
@packed_option
@kv_memory_option
@click.option("--kv-blocks", metavar="N", type=click.IntRange(1), help="Size of the KV cache in blocks.")
@click.option(
    "--no-prefix-cache",
    "prefix_cache",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Compute every prompt whole, also a beginning that an earlier request had.",
)
@max_model_len_option
@speculate_option
@draft_option
@draft_weight_dtype_option
@click.option(
    "--served-model-name",
    "served_model_names",
    metavar="NAME",
    multiple=True,
    help="Name by which requests may ask for the model; repeat it for more, the first is reported. Default: the "
    "name of the run or folder.",
)
@serving_options
@click.option(
    "--max-running", metavar="N", type=click.IntRange(1), help="Most sequences that are computed at the same time."
)
@click.option("--max-queued", metavar="N", type=click.IntRange(0), help="Most sequences that wait; more are refused.")
@click.option(
    "--max-queued-tokens", metavar="N", type=click.IntRange(1), help="Most prompt tokens that wait; more are refused."
)
@click.option(
    "--quota-sequences", metavar="N", type=click.IntRange(1), help="Most sequences of one caller, running and waiting."
)
@click.option("--quota-tokens", metavar="N", type=click.IntRange(1), help="Most prompt tokens of one caller that wait.")
@click.option(
    "--max-step-ms",
    metavar="MS",
    type=click.FloatRange(0, min_open=True),
    help="Longest step, in milliseconds: prompts are cut so that 99 of 100 are expected to take no longer.",
)
@click.option(
    "--slow-step-ms",
    metavar="MS",
    type=click.FloatRange(0, min_open=True),
    help="Log each step that takes longer, in milliseconds, with its size.",
)
@click.option(
    "--max-restarts",
    metavar="N",
    type=click.IntRange(0),
    help="How often dead workers are started again before the server gives up; default: 0.",
)
@click.option(
    "--step-timeout",
    metavar="SECONDS",
    type=click.FloatRange(0, min_open=True),
    help="Seconds after which the workers of a step that is not answered are killed; default: 20 times its predicted "
    "time, at least 120.",
)
@click.option(
    "--drain-timeout",
    metavar="SECONDS",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds in which live requests may finish after SIGTERM.",
)
@click.option(
    "--follow",
    is_flag=True,
    help="Serve newer steps of the run folder CKPT as they are committed, and of adapters that are run folders.",
)
@click.option("--default-max-new-tokens", metavar="N", type=click.IntRange(1), help="Limit for requests that set none.")
@click.option("--tls-cert", metavar="FILE", type=PATH, help="PEM file of the server's certificate; needs --tls-key.")
@click.option("--tls-key", metavar="FILE", type=PATH, help="PEM file of its private key.")
@click.option(
    "--tls-client-ca",
    metavar="FILE",
    type=PATH,
    help="PEM file of the authorities of clients; every client then needs a certificate.",
)
@click.option(
    "--tokens",
    metavar="FILE",
    type=PATH,
    help="File of the callers' tokens, which `tk token` makes; without it every caller may make every call.",
)
@click.option("--log-prompts", is_flag=True, help="Log the prompts of requests, too.")
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="Send a trace of each request to the OpenTelemetry collector at URL (http://HOST:4317). Needs the extra otel.",
)
@click.option(
    "--insecure", is_flag=True, help="Allow a --host that other machines can reach, without encryption or tokens."
)
def serve(
    checkpoint: Path,
    base: Path | None,
    follow: bool,
    **values: Any,
) -> None:
    """Serve CKPT (a step folder, a run folder or a Hugging Face folder) as tk.v1.Generation over gRPC.

    The port answers health while the model is loaded. Prints `ready HOST:PORT` on stdout once the server accepts
    requests. On SIGTERM or Ctrl-C it finishes the live requests and exits with 0; a second signal ends it within a
    second. If a worker dies, or hangs for --step-timeout, all requests fail; the workers start again up to
    --max-restarts times, and then it exits with 1. Admin.Reload, or --follow, changes to another step of the model;
    requests end on the weights they began with. Of an adapter the base is served, and the adapter by its folder's name.
    """
    from ..core.background_log import background_log
    from ..core.console_log import shown_form
    from ..core.process import exit_within, share_one_memory_area
    from ..infer.engine.worker.processes import WorkerProcesses
    from ..infer.serve.options import check_address, within_open_files

    share_one_memory_area()
    form = shown_form() or "text"
    log = background_log(form if values["log_prompts"] else f"private {form}")
    click.get_current_context().with_resource(log)
    server_options, options = _server_options(values), _engine_options(checkpoint, values)
    check_address(server_options)
    server_options = within_open_files(server_options, options.max_running + options.max_queued, options.tp)
    ports = _ports(server_options)
    threads = options.threads_per_rank
    with (
        closing(WorkerProcesses(options.tp, threads)) as processes,
        closing(_begun(options, base, processes)) as engine,
        ExitStack() as stack,
    ):
        from ..infer.serve.app import End, serve_until_signal  # gRPC, while the workers load the model
        from ..infer.serve.operations.followed_runs import watchers_of
        from ..infer.serve.operations.model_switch import ModelSwitch
        from ..infer.serve.operations.next_engine import begin_beside
        from ..infer.serve.operations.run_watcher import watching

        switch = stack.enter_context(closing(ModelSwitch(engine, begin_beside)))
        watchers = watchers_of(engine, switch) if follow else []

        def on_ready(address: str) -> None:
            _show_ready(engine.info.kernels, f"{threads} on each of {options.tp} ranks", address, ports)
            for watcher in watchers:
                stack.enter_context(watching(watcher))

        codes = {End.DRAINED: 0, End.TERMINATED: EXIT_TERMINATED}
        last = {End.DRAINED: server_options.drain_timeout + LAST_SECONDS, End.SECOND_SIGNAL: HURRIED_SECONDS}

        def on_signal(end: End) -> None:
            exit_within(last.get(end, LAST_SECONDS), codes.get(end, EXIT_INTERRUPTED))

        end = serve_until_signal(switch, server_options, on_ready, switch, ports, on_signal)
    if end is End.INTERRUPTED:
        raise click.Abort
    click.get_current_context().exit(codes.get(end, EXIT_INTERRUPTED))


def _engine_options(checkpoint: Path, values: dict[str, Any]) -> "EngineOptions":
    """Returns the options of the engine from the values of the command's.

    Raises:
        ConfigError: one is wrong for every model, or two adapters have one name.
    """
    from ..infer.engine.options import EngineOptions

    adapters = dict(values["adapters"])
    if len(adapters) < len(values["adapters"]):
        raise ConfigError("--adapter names two adapters alike; give each a name of its own.")
    given = {name: value for name, value in values.items() if value is not None}
    options = EngineOptions(checkpoint, **given | {"adapters": adapters})
    options.validate()
    return options


def _begun(options: "EngineOptions", base: Path | None, processes: "WorkerProcesses") -> "Engine":
    """Returns an engine that loads the model, while the workers import their modules."""
    from ..infer.engine.engine import Engine

    changed = with_base(options, base)

    def on_plan(info: "ModelInfo", memory: "MemoryPlan") -> None:
        if taken := sorted(changed.adapters.keys() & set(info.names)):
            raise ConfigError(
                f"{taken[0]!r} is the name of the model and of an adapter. Give the adapter another one (--adapter "
                "NAME=CKPT), or the model (--served-model-name NAME)."
            )
        _show(info, memory)

    return Engine.begin(changed, on_plan, processes)


def _show_ready(kernels: str, threads: str, address: str, ports: "list[Listener]") -> None:
    say(f"{'kernels':<10}{kernels}\n{'threads':<10}{threads}")
    click.echo(f"ready {address}")
    for port in (each for each in ports if each.name == "HTTP"):
        click.echo(f"http {port.address}")


def _server_options(values: dict[str, Any]) -> "ServerOptions":
    """Takes the options of the server, and checks them, from the values of the command's; leaves the engine's."""
    from ..infer.serve.access.tls import certificates_of
    from ..infer.serve.metrics.traces import chosen_endpoint
    from ..infer.serve.options import ServerOptions

    certificates = certificates_of(*(values.pop(name) for name in ("tls_cert", "tls_key", "tls_client_ca")))
    endpoint = chosen_endpoint(values.pop("otlp_endpoint"))
    own = {name: values.pop(name) for name in _SERVER_VALUES}
    options = ServerOptions(**own, certificates=certificates, otlp_endpoint=endpoint)
    options.validate()
    return options


def _ports(options: "ServerOptions") -> "list[Listener]":
    """Returns the ports beside that of gRPC."""
    if options.http_port is None and options.metrics_port is None:
        return []
    from ..infer.serve.http.metrics_port import metrics_port_of
    from ..infer.serve.openai.http_port import http_port_of

    ports = [] if options.http_port is None else [http_port_of(options)]
    return ports if options.metrics_port is None else [*ports, metrics_port_of(options)]


def _show(info: "ModelInfo", memory: "MemoryPlan") -> None:
    step = f"step {info.step}, " if info.step else ""
    say(
        f"{info.name} ({info.architecture}), {step}{info.manifest_sha256[:12]}: "
        f"{info.max_model_len} tokens per request, {info.max_running} requests at a time\n{memory.table()}"
    )
