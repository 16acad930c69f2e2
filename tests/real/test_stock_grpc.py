"""Stock gRPC for Python, older and without tk: a health prober, and the example with generated code of its own."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tk.infer.client.client import Client
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "clients" / "python" / "client.py"
PROBE = Path(__file__).with_name("probe.py")


def environment(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


def test_a_stock_prober_sees_health_and_its_change(clients: Path, own: Serving) -> None:
    with subprocess.Popen(
        [clients, PROBE, own.target], stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        assert process.stdout.readline() == "SERVING\n"
        # A live request, so that the drain lasts until the watcher has seen it.
        with Client(own.target) as client:
            deltas = client.stream("a", SamplingParams(n=4, max_new_tokens=3000, ignore_eos=True))
            next(deltas)
            own.process.terminate()
            assert process.stdout.readline() == "NOT_SERVING\n"
            assert process.wait(WAIT_SECONDS) == 0
            assert list(deltas)
    assert found["health"] == {"": "SERVING", "tk.v1.Generation": "SERVING", "unknown": "NOT_FOUND"}
    assert {"tk.v1.Generation", "grpc.health.v1.Health"} <= set(found["services"])
    assert own.wait()[0] == 0


def test_the_python_example_runs_without_tk(clients: Path, own: Serving, tmp_path: Path) -> None:
    generate = [str(clients), "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto' / 'v1'}"]
    generate += [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", "generation.proto"]
    subprocess.run(generate, check=True, env=environment())

    def run(prompt: str) -> subprocess.CompletedProcess[str]:
        words = [str(clients), str(EXAMPLE), own.target, prompt]
        variables = environment(PYTHONPATH=str(tmp_path))
        return subprocess.run(words, capture_output=True, text=True, timeout=WAIT_SECONDS, env=variables)

    answered = run("def main(")
    assert (answered.returncode, answered.stderr) == (0, "")
    assert len(answered.stdout) > 1
    refused = run("")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("INVALID_ARGUMENT: ")
    with Client(own.target) as client:
        deltas = client.stream("a", SamplingParams(n=4, max_new_tokens=3000, ignore_eos=True))
        next(deltas)
        [worker] = own.worker_ids()
        os.kill(worker, signal.SIGSTOP)  # its sequences stay
        try:
            full = run("def main(")
        finally:
            os.kill(worker, signal.SIGCONT)
        assert list(deltas)
    assert full.stderr.startswith("RESOURCE_EXHAUSTED: ")
    assert "Try again in" in full.stderr
