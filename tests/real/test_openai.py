"""The `openai` package, in an environment without tk, against the HTTP port of a trained chat model."""

import json
import subprocess
from pathlib import Path

import pytest

from tk.infer.client.client import Client
from tk.infer.engine.request.prompts import Conversation
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving

pytestmark = pytest.mark.real
CHECKS = Path(__file__).with_name("openai_checks.py")
QUESTION = "What is the capital of France? Answer in one short sentence."


def test_the_openai_package_works_unchanged(clients: Path, smollm: Path) -> None:
    serving = Serving(str(smollm), "--max-running", "4", "--max-model-len", "1024", "--http", "0").wait_ready()
    try:
        assert serving.process.stdout is not None
        address = serving.process.stdout.readline().removeprefix("http ").strip()
        words = [str(clients), str(CHECKS), f"http://{address}/v1", smollm.name, QUESTION]
        done = subprocess.run(words, capture_output=True, text=True, timeout=2 * WAIT_SECONDS)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        with Client(serving.target) as client:
            conversation = Conversation([{"role": "user", "content": QUESTION}])
            [expected] = client.generate(conversation, SamplingParams(temperature=0.0, max_new_tokens=40))
    finally:
        serving.close()
    assert found["models"] == [smollm.name]
    assert found["answer"] == found["streamed"] == expected.text
    assert "Paris" in found["answer"]
    assert (found["reason"], found["prompt_tokens"]) == ("stop", expected.usage.prompt_tokens)
    assert json.loads(found["shaped"]) == {"city": "Paris"}
    assert found["completion"] == found["pieces"]
    assert "Paris" in found["completion"]
    name, status, body = found["bad_field"]
    assert (name, status, body["param"]) == ("BadRequestError", 400, "temperature")
    assert found["bad_model"][:2] == ["NotFoundError", 404]
