"""A client in another language, grpc-js under Node: the example does the whole thing against a real server."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tk.infer.client.client import Client
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving

pytestmark = pytest.mark.real
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "clients" / "node" / "client.js"
CHECKS = Path(__file__).with_name("checks.js")
PROMPT = "def main("
CHOSEN = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


def start(node: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    environment = os.environ | {"NODE_PATH": str(node / "node_modules")}
    words = [node / "node", *arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_node_client_does_everything(node: Path, own: Serving) -> None:
    with Client(own.target) as client:
        info = client.model_info()
        [expected] = client.generate(PROMPT, CHOSEN)
    with start(node, CHECKS, EXAMPLE, own.target, PROMPT) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        own.process.terminate()
        out, err = process.communicate(timeout=WAIT_SECONDS)
    assert (line, process.returncode) == ("draining?\n", 0), err
    found = json.loads(out)

    assert found["info"]["name"] == "tiny-llama"
    assert found["info"]["manifest_sha256"] == info.manifest_sha256
    assert int(found["info"]["kv_bytes_per_token"]) == info.kv_bytes_per_token
    [choice] = found["once"]["choices"]
    assert (choice["text"], choice["token_ids"]) == (expected.text, list(expected.token_ids))
    started, *deltas, finished = found["events"]
    assert started["started"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert "".join(each["delta"]["text"] for each in deltas) == expected.text
    assert finished["finished"]["reason"] == "FINISH_REASON_LENGTH"

    assert found["badField"]["code"] == "INVALID_ARGUMENT"
    assert found["badField"]["fields"] == ["sampling.temperature"]
    assert found["badModel"]["code"] == "NOT_FOUND"
    assert found["deadline"]["code"] == "DEADLINE_EXCEEDED"
    assert found["full"]["code"] == "RESOURCE_EXHAUSTED"
    assert found["full"]["retrySeconds"] >= 1
    assert found["health"] == ["SERVING", "NOT_SERVING"]
    assert found["draining"]["code"] == "UNAVAILABLE"
    assert found["draining"]["retrySeconds"] >= 1
    assert found["finishedWhileDraining"] == 4, "a drain loses no admitted request"
    code, _, stderr = own.wait()
    assert code == 0
    assert "draining: 1 live requests" in stderr, "cancelled and late ones have ended before"


def test_the_node_example_streams_a_prompt_and_reports_a_refusal(node: Path, own: Serving) -> None:
    with start(node, EXAMPLE, own.target, PROMPT) as process:
        out, err = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, err) == (0, "")
    assert len(out) > 1
    with start(node, EXAMPLE, own.target, "") as process:
        out, err = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("INVALID_ARGUMENT: ")


def test_a_node_client_without_its_arguments_asks_for_them(node: Path) -> None:
    with start(node, EXAMPLE) as process:
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, err.count("\n")) == (2, 1)
    assert "node client.js HOST:PORT" in err
