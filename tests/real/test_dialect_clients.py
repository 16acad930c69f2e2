"""Programs that are not ours speak OpenAI's dialect with the HTTP port: langchain, litellm, llm, an old openai."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving
from tk.tests.real.test_openai import CHECKS, QUESTION

pytestmark = pytest.mark.real
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def url(smollm: Path) -> Iterator[str]:
    """The address of a server of the chat model."""
    serving = Serving(str(smollm), "--max-model-len", "1024", "--http", "0").wait_ready()
    assert serving.process.stdout is not None
    yield f"http://{serving.process.stdout.readline().removeprefix('http ').strip()}/v1"
    serving.close()


def said(*words: str | Path, **variables: str) -> str:
    """Runs a program, and returns what it prints."""
    environment = os.environ | variables
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=2 * WAIT_SECONDS, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_langchain_and_litellm_work_unchanged(dialects: Path, smollm: Path, url: str) -> None:
    script = Path(__file__).with_name("dialect_checks.py")
    python = dialects / "venv" / "bin" / "python"
    found = json.loads(said(python, script, url, smollm.name, QUESTION, LITELLM_LOCAL_MODEL_COST_MAP="True"))
    by_langchain = found["langchain"]
    assert by_langchain["whole"] == by_langchain["streamed"] == by_langchain["named"] == ANSWER
    assert by_langchain["tokens"] == 8
    assert len(by_langchain["batch"]) == 20
    assert by_langchain["alone"] == [by_langchain["batch"][3], by_langchain["batch"][17]]
    assert found["litellm"] == {"whole": ANSWER, "streamed": ANSWER, "tagged": ANSWER}


@pytest.mark.parametrize("way", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_the_program_llm_works_unchanged(
    dialects: Path, smollm: Path, url: str, tmp_path: Path, way: tuple[str, ...]
) -> None:
    model = f'- model_id: served\n  model_name: {smollm.name}\n  api_base: "{url}"\n'
    (tmp_path / "extra-openai-models.yaml").write_text(model)
    words = ("-m", "served", "-s", "You are brief.", "-o", "temperature", "0", *way, QUESTION)
    variables = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    assert said(dialects / "venv" / "bin" / "llm", *words, **variables).strip() == ANSWER


def test_the_openai_package_of_a_year_before_works_unchanged(dialects: Path, smollm: Path, url: str) -> None:
    found = json.loads(said(dialects / "old" / "bin" / "python", CHECKS, url, smollm.name, QUESTION))
    assert found["answer"] == found["streamed"]
    assert "Paris" in found["answer"]
    assert json.loads(found["shaped"]) == {"city": "Paris"}
