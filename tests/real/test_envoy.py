"""Envoy as examples/deploy configures it, before two servers: TLS, affinity by prefix, a drain without loss."""

import itertools
import json
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "deploy" / "kubernetes"
CERTIFICATES = ROOT / "tests" / "infer" / "serve" / "certificates"
NAMED = [("grpc.ssl_target_name_override", "localhost")]


def credentials() -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials((CERTIFICATES / "ca.pem").read_bytes())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def write_config(folder: Path, port: int, admin_port: int, targets: list[str]) -> Path:
    """Writes the example's files for this machine: other paths and addresses, and a port that shows Envoy's view."""
    certificate = (EXAMPLE / "certificate.yaml").read_text()
    for name, file in (("tls.crt", "server.pem"), ("tls.key", "server.key")):
        certificate = certificate.replace(f"/etc/tls/{name}", str(CERTIFICATES / file))
    (folder / "certificate.yaml").write_text(certificate.replace("path: /etc/tls ", f"path: {CERTIFICATES} "))
    text = (EXAMPLE / "envoy.yaml").read_text().replace("/etc/envoy/certificate.yaml", f"{folder}/certificate.yaml")
    text = text.replace("/etc/servers/ca.crt", str(CERTIFICATES / "ca.pem"))
    text = text.replace("sni: tk-servers", "sni: localhost").replace("exact: tk-servers", "exact: localhost")
    config: dict[str, Any] = yaml.safe_load(text)
    [listener], [cluster] = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    addresses = [target.rpartition(":") for target in targets]
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(number)}}}}
        for host, _, number in addresses
    ]
    config["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin_port}}}
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def servers(tiny: Path) -> Iterator[list[Serving]]:
    with ExitStack() as stack:
        tls = "--tls-cert", str(CERTIFICATES / "server.pem"), "--tls-key", str(CERTIFICATES / "server.key")
        started = [Serving(str(tiny), "--kv-blocks", "128", *tls) for _ in range(2)]
        for serving in started:
            stack.callback(serving.close)
        yield [serving.wait_ready() for serving in started]


@pytest.fixture
def channel(envoy: Path, servers: list[Serving], tmp_path: Path) -> Iterator[grpc.Channel]:
    """A channel to Envoy before the servers."""
    port, admin_port = free_port(), free_port()
    config = write_config(tmp_path, port, admin_port, [serving.target for serving in servers])
    command = [str(envoy), "--config-path", str(config), "--use-dynamic-base-id", "--concurrency", "1"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, "--log-level", "warning"], stdout=log, stderr=log)
    try:
        wait_healthy(admin_port, len(servers), process, tmp_path / "log")
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials(), options=NAMED) as channel:
            yield channel
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def proxy(channel: grpc.Channel) -> Any:
    """A stub that calls the servers through Envoy."""
    return GenerationStub(channel)


def wait_healthy(admin_port: int, count: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until Envoy sends calls to all servers: one that it has not yet asked for its health gets none."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/clusters?format=json", timeout=5) as answer,
        ):
            [cluster] = json.load(answer)["cluster_statuses"]
            hosts = [host["health_status"] for host in cluster.get("host_statuses", [])]
            if sum("failed_active_health_check" not in health for health in hosts) == count:
                return
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def cached(stub: Any, prompt: list[int], prefix: str) -> int:
    """Returns how many tokens of a prompt the server that Envoy chose had computed before."""
    request = pb.GenerateRequest(tokens={"ids": prompt}, stopping={"max_new_tokens": 1})
    answer = stub.GenerateOnce(request, timeout=WAIT_SECONDS, metadata=[("x-tk-prefix", prefix)])
    return int(answer.usage.cached_tokens)


def homes(servers: list[Serving], prompts: list[list[int]]) -> list[list[int]]:
    """Returns the numbers of the prompts that each server has in its cache."""
    found = []
    for serving in servers:
        with grpc.secure_channel(serving.target, credentials(), options=NAMED) as channel:
            stub: Any = GenerationStub(channel)
            found.append([number for number, prompt in enumerate(prompts) if cached(stub, prompt, "")])
    return found


def test_a_prefix_stays_with_its_server_and_prefixes_are_spread(proxy: Any, servers: list[Serving]) -> None:
    prompts = [[number] * 100 for number in range(8)]
    for number, prompt in enumerate(prompts):
        assert [cached(proxy, prompt, f"conversation {number}") for _ in range(3)] == [0, 96, 96]
    first, second = homes(servers, prompts)
    assert first
    assert second
    assert sorted(first + second) == list(range(8))


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_busy_server_takes_the_calls_of_one_that_has_ended(
    channel: grpc.Channel, proxy: Any, servers: list[Serving], sent: signal.Signals
) -> None:
    """Until Envoy asks for its health again it takes the ended server for an idle one, which balancing prefers."""
    prompts = [[number] * 40 for number in range(20)]
    for number, prompt in enumerate(prompts):
        cached(proxy, prompt, str(number))
    ended, busy = homes(servers, prompts)
    health = health_pb2_grpc.HealthStub(channel)
    watches = []
    for pair in itertools.islice(zip(itertools.cycle(ended), itertools.cycle(busy), strict=False), 8):
        for number in pair:
            watches.append(health.Watch(health_pb2.HealthCheckRequest(), metadata=[("x-tk-prefix", str(number))]))
            next(watches[-1])
    servers[0].process.send_signal(sent)
    assert servers[0].wait()[0] == (0 if sent is signal.SIGTERM else -sent)
    for number, prompt in enumerate(prompts):
        cached(proxy, prompt, str(number))


def test_calls_go_on_while_a_server_drains(proxy: Any, servers: list[Serving]) -> None:
    """A rolling update: one server after the other gets SIGTERM; refused calls are asked again at the other one."""
    request = pb.GenerateRequest(text="a", stopping={"max_new_tokens": 300, "ignore_eos": True})
    streams = [proxy.Generate(request, timeout=WAIT_SECONDS) for _ in range(8)]
    for stream in streams:
        assert next(stream).WhichOneof("event") == "started"
    servers[0].process.terminate()
    for number in range(20):
        cached(proxy, [number] * 40, str(number))
    for stream in streams:
        assert list(stream)[-1].WhichOneof("event") == "finished"
    assert servers[0].wait()[0] == 0
    for number in range(20):
        cached(proxy, [number] * 40, str(number))
