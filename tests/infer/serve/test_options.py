"""The options of a server: addresses that others reach, ports, and values that are wrong."""

import socket
from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.infer.serve.options import ServerOptions, address_of, check_address


def test_a_free_address_passes_and_stays_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for _ in range(2):
        check_address(ServerOptions(port=port))
    assert address_of("::1", port) == f"[::1]:{port}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_hosts_that_others_reach_need_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        ServerOptions(host=host).validate()
    ServerOptions(host=host, insecure=True).validate()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_insecure(host: str) -> None:
    options = ServerOptions(host=host)
    options.validate()
    assert not options.insecure


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70_000},
        {"admin_port": -1},
        {"admin_port": 50051},
        {"health_port": 50051},
        {"health_port": 8000, "http_port": 8000},
        {"metrics_port": 65_536},
        {"metrics_host": "0.0.0.0", "metrics_port": 0},
        {"drain_timeout": -1.0},
        {"default_max_new_tokens": 0},
    ],
)
def test_wrong_options_are_config_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerOptions(**wrong).validate()


def test_all_ports_are_checked_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*in use"):
            check_address(ServerOptions(port=0, admin_port=port))
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*in use"):
            check_address(ServerOptions(port=0, health_port=port))
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*in use"):
            check_address(ServerOptions(port=0, host="::1", metrics_port=port))
