"""The files of examples/deploy against the code: options, ports, probes, secrets and times fit together."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tk.cli.serve import serve
from tk.infer.serve.grpc.health import LIVENESS, READINESS

DEPLOY = Path(__file__).resolve().parents[2] / "examples" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


def options_of(words: list[str]) -> dict[str, Any]:
    """Returns the options of a `tk serve`; an unknown one, or a wrong value, ends the test."""
    return dict(serve.make_context("tk serve", list(words)).params)


def documents(name: str) -> dict[str, dict[str, Any]]:
    """Returns the Kubernetes objects of a file, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((KUBERNETES / name).read_text())}


def seconds(text: str, key: str) -> float:
    """Returns a number of the unit."""
    [found] = re.findall(rf"^{key}=(\d+)$", text, re.MULTILINE)
    return float(found)


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    [only] = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


def unit_command() -> list[str]:
    text = (DEPLOY / "tk.service").read_text().replace("\\\n", " ")
    [command] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    return shlex.split(command)


def test_the_image_builds_kernels_and_runs_as_a_user_without_rights() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    _, build, final = text.split("\nFROM ")
    [folder] = re.findall(r"RUN tk doctor --build (\S+)", build)
    assert f"TK_KERNELS={folder}" in final
    assert f"COPY --from=build {folder} {folder}" in final, "root's, so that the user cannot change what it loads"
    [user] = re.findall(r"^USER (\d+)$", final, re.MULTILINE)
    assert int(user) > 0
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (DEPLOY.parents[1] / source).exists(), source
    [entry], [arguments] = (re.findall(rf"^{key} (\[.*\])$", final, re.MULTILINE) for key in ("ENTRYPOINT", "CMD"))
    program, command, *always = json.loads(entry)
    assert (program, command) == ("tk", "serve")
    options = options_of([*always, *json.loads(arguments)])
    [probe] = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", final, re.MULTILINE)
    assert json.loads(probe)[2] == f"127.0.0.1:{options_of([*always, '/model'])['health_port']}"
    [seconds_to_stop] = re.findall(r"--stop-timeout (\d+)", text)
    assert int(seconds_to_stop) >= options["drain_timeout"] + 10
    assert None not in (options["tls_cert"], options["tls_key"], options["tokens"])
    assert not options["insecure"]


def test_the_image_installs_pinned_versions_and_nothing_of_development(root: Path, tmp_path: Path) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    [extras] = re.findall(r"RUN python requirements_of\.py (.*) > wanted\.txt", text)
    command = [sys.executable, str(DEPLOY / "requirements_of.py"), *extras.split()]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60)
    wanted = {canonicalize_name(Requirement(line).name) for line in done.stdout.splitlines()}
    locked = {
        canonicalize_name(line.partition("==")[0]) for line in (root / "requirements.lock").read_text().splitlines()
    }
    assert wanted <= locked
    assert {"torch", "grpcio", "h11"} <= wanted
    assert not wanted & {"pytest", "mypy", "ruff", "transformers", "openai"}


def test_the_unit_waits_for_a_drain() -> None:
    program, command, *arguments = unit_command()
    options = options_of(arguments)
    text = (DEPLOY / "tk.service").read_text()
    assert (program, command) == ("/opt/tk/bin/tk", "serve")
    assert None not in (options["tls_cert"], options["tls_key"], options["tokens"])
    assert not options["insecure"]
    assert seconds(text, "TimeoutStopSec") >= options["drain_timeout"] + 10
    assert "KillMode=mixed\n" in text, "workers must not get the signal: the drain needs them"
    assert "KillSignal=SIGTERM\n" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "tk.service"
    unit.write_text((DEPLOY / "tk.service").read_text().replace("/opt/tk/bin/tk", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
    assert "tk.service" not in done.stderr, done.stderr


def test_the_servers_of_kubernetes_are_probed_drained_and_bounded() -> None:
    deployment = documents("tk.yaml")["Deployment"]
    pod, tk = deployment["spec"]["template"]["spec"], container(deployment)
    options = options_of(tk["args"])
    assert [port["containerPort"] for port in tk["ports"]] == [options["port"], options["health_port"]]
    probes = {name: tk[name]["grpc"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in probes.values()} == {options["health_port"]}, "probes know no TLS"
    assert [probe["service"] for probe in probes.values()] == [LIVENESS, LIVENESS, READINESS]
    pause = tk["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause + options["drain_timeout"] + 10
    assert tk["resources"]["limits"]["cpu"] == str(options["threads"])
    mounts = {mount["name"]: mount["mountPath"] for mount in tk["volumeMounts"]}
    assert Path(mounts["tokens"]) == options["tokens"].parent
    assert Path(mounts["tls"]) == options["tls_cert"].parent == options["tls_key"].parent
    assert Path(mounts["model"]) == options["checkpoint"]
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    [user] = re.findall(r"^USER (\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == int(user)


def test_only_the_balancer_reaches_servers_and_by_tls() -> None:
    servers, balancer = documents("tk.yaml"), documents("balancer.yaml")
    assert not options_of(container(servers["Deployment"])["args"])["insecure"]
    policy = servers["NetworkPolicy"]["spec"]
    labels = servers["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == labels == servers["Service"]["spec"]["selector"]
    [rule] = policy["ingress"]
    [source] = rule["from"]
    assert source["podSelector"]["matchLabels"] == balancer["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert servers["Service"]["spec"]["clusterIP"] == "None", "the balancer sees every server"


def test_the_balancer_asks_the_servers_that_kubernetes_has() -> None:
    servers, balancer = documents("tk.yaml"), documents("balancer.yaml")
    config = yaml.safe_load((KUBERNETES / "envoy.yaml").read_text())["static_resources"]
    [listener], [cluster] = config["listeners"], config["clusters"]
    envoy = container(balancer["Deployment"])
    assert listener["address"]["socket_address"]["port_value"] == envoy["ports"][0]["containerPort"]
    [group] = cluster["load_assignment"]["endpoints"]
    [endpoint] = group["lb_endpoints"]
    address = endpoint["endpoint"]["address"]["socket_address"]
    [port] = servers["Service"]["spec"]["ports"]
    assert address == {"address": servers["Service"]["metadata"]["name"], "port_value": port["port"]}
    tls = cluster["transport_socket"]["typed_config"]
    validation = tls["common_tls_context"]["validation_context"]
    [name] = validation["match_typed_subject_alt_names"]
    assert name["matcher"]["exact"] == tls["sni"] == address["address"]
    authority = Path(validation["trusted_ca"]["filename"])
    assert str(authority.parent) in {mount["mountPath"] for mount in envoy["volumeMounts"]}
    [check] = cluster["health_checks"]
    assert check["grpc_health_check"]["service_name"] == READINESS
    drain = options_of(container(servers["Deployment"])["args"])["drain_timeout"]
    assert envoy["lifecycle"]["preStop"]["sleep"]["seconds"] >= drain, "its streams end before it does"


def test_every_secret_has_a_command_that_makes_it() -> None:
    readme = (DEPLOY / "README.md").read_text()
    for name in ("tk.yaml", "balancer.yaml"):
        for volume in documents(name)["Deployment"]["spec"]["template"]["spec"]["volumes"]:
            if secret := volume.get("secret"):
                [command] = re.findall(rf"kubectl create secret \w+ {secret['secretName']} .*", readme)
                keys = {item["key"] for item in secret.get("items", [])}
                assert all(re.search(rf"--from-file={re.escape(key)}\b", command) for key in keys)


def test_every_file_of_the_customization_exists() -> None:
    customization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    [generated] = customization["configMapGenerator"]
    for name in (*customization["resources"], *generated["files"]):
        assert list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def test_an_option_that_does_not_exist_is_seen() -> None:
    with pytest.raises(click.UsageError):
        options_of(["/model", "--drain-timout=60"])
