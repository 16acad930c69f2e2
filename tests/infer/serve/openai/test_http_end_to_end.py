"""`tk serve --http` as a process of its own over a tiny model with random weights: every path, and its end.

tests/real/test_openai.py asks a trained model.
"""

import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from tk.infer.client.client import Client
from tk.infer.engine.request.prompts import Conversation
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.proto.open_inference import open_inference_pb2 as oip
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.open_inference.conftest import Calls, asking
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving, stopped
from tk.tests.infer.serve.tiny_model import write_tiny_model

TEMPLATE = "{% for m in messages %}<|end|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
MESSAGES = [{"role": "system", "content": "grüße"}, {"role": "user", "content": "hi"}]
CHAT = {"model": "tiny-llama", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
SCHEMA = {"type": "array", "items": {"enum": [1, "two", None]}, "minItems": 2, "maxItems": 4}
SHAPED = {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA, "strict": True}}
LONG = {"model": "tiny-llama", "prompt": "a", "max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}


class HttpServing(Serving):
    """A server with both ports.

    Attributes:
        address: HOST:PORT of HTTP.
        worker: the process id of its worker; a conversation starts a process for its template, too.
    """

    def __init__(self, model: Path, *more: str) -> None:
        limits = "--kv-blocks", "64", "--max-running", "4", "--max-queued", "0"
        super().__init__(str(model), *limits, "--http", "0", *more)
        self.wait_ready()
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().removeprefix("http ").strip()
        [self.worker] = self.worker_ids()

    def client(self) -> openai.OpenAI:
        url = f"http://{self.address}/v1"
        return openai.OpenAI(base_url=url, api_key="none", timeout=WAIT_SECONDS, max_retries=0)

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=WAIT_SECONDS)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[HttpServing]:
    """A server that tests leave as they find it."""
    serving = HttpServing(model, "--served-model-name", "tiny-llama", "--served-model-name", "org/other name")
    yield serving
    serving.close()


@pytest.fixture
def client(shared: HttpServing) -> Iterator[openai.OpenAI]:
    with shared.client() as client:
        yield client


def test_a_conversation_is_answered_as_over_grpc(shared: HttpServing, client: openai.OpenAI) -> None:
    with Client(shared.target) as other:
        [expected] = other.generate(Conversation(MESSAGES), SamplingParams(temperature=0.0, max_new_tokens=12))
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        *("assistant", expected.text),
        "length" if len(expected.token_ids) == 12 else "stop",
    )
    assert answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert len(choice.logprobs.content) == len(expected.token_ids)
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)

    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)


def test_a_long_answer_comes_bit_by_bit(client: openai.OpenAI) -> None:
    # A busy event loop joins the tokens of several steps in one event, never those of 400 steps.
    events = list(client.completions.create(**LONG))
    assert sum(1 for event in events if event.choices and event.choices[0].text) > 4


def test_answers_keep_a_schema_whole_and_in_events(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**CHAT, "max_tokens": 60, "temperature": 1, "seed": 3, "response_format": SHAPED}
    answer = client.chat.completions.create(**asked, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        items = json.loads(choice.message.content)
        assert 2 <= len(items) <= 4
        assert all(item in (1, "two", None) for item in items)
        assert choice.finish_reason == "stop"
    streamed = client.chat.completions.create(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == answer.choices[0].message.content
    impossible = SHAPED | {"json_schema": {"name": "x", "schema": {"type": "colour"}}}
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**CHAT | {"response_format": impossible})
    assert error.value.param == "response_format"


def test_what_the_port_says_of_itself(shared: HttpServing, client: openai.OpenAI) -> None:
    for model, name in zip(client.models.list(), ("tiny-llama", "org/other name"), strict=True):
        assert (model.id, model.max_model_len, model.has_chat_template) == (name, 512, True)
    assert shared.get("/health") == (200, b'{"status":"serving"}')
    status, load = shared.get("/load")
    assert (status, json.loads(load)["blocks_total"]) == (200, 64)
    client.completions.create(model="tiny-llama", prompt="a", max_tokens=2)
    status, metrics = shared.get("/metrics")
    assert status == 200
    [tokens] = [line for line in metrics.decode().splitlines() if line.startswith("tk_generation_tokens_total{")]
    assert float(tokens.split()[1]) >= 2
    assert shared.get("/")[1].startswith(b"<!doctype html>")


def test_the_model_has_its_names_in_every_protocol(model: Path, shared: HttpServing, client: openai.OpenAI) -> None:
    created = int((model / "model.safetensors").stat().st_mtime)
    with grpc.insecure_channel(shared.target) as channel, Client(shared.target) as ours:
        info = ours.model_info()
        assert (info.names, info.created) == (("tiny-llama", "org/other name"), created)
        stub: Any = GenerationStub(channel)
        for name in info.names:
            assert client.models.retrieve(name).created == created
            assert client.completions.create(model=name, prompt="a", max_tokens=2).model == "tiny-llama"
            request = pb.GenerateRequest(text="a", model=name, stopping={"max_new_tokens": 2})
            assert len(stub.GenerateOnce(request, timeout=WAIT_SECONDS).choices[0].token_ids) == 2
            asked = asking("a", max_tokens=2)
            asked.model_name = name
            assert Calls(channel).ModelInfer(asked, timeout=WAIT_SECONDS).model_name == "tiny-llama"
            assert Calls(channel).ModelReady(oip.ModelReadyRequest(name=name), timeout=WAIT_SECONDS).ready
        with pytest.raises(grpc.RpcError) as unknown:
            stub.GenerateOnce(pb.GenerateRequest(text="a", model=model.name + "2"), timeout=WAIT_SECONDS)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other name", prompt="a")
    assert missing.value.code == "model_not_found"


def test_a_full_server_and_a_short_time_are_refused(shared: HttpServing, client: openai.OpenAI) -> None:
    with client.completions.create(**LONG, n=4) as stream:
        next(stream)
        with stopped(shared.worker), pytest.raises(openai.RateLimitError) as full:
            client.chat.completions.create(**CHAT)
    assert 1 <= int(full.value.response.headers["retry-after"]) <= 60
    while json.loads(shared.get("/load")[1])["running"]:  # the server has not noticed yet that the client left
        pass
    with pytest.raises(openai.APIStatusError) as late:
        client.chat.completions.create(**CHAT, extra_headers={"x-request-timeout": "0.000001"})
    assert (late.value.status_code, late.value.type) == (504, "timeout_error")


def test_sigterm_finishes_streams_and_refuses_new_requests(model: Path) -> None:
    serving = HttpServing(model)
    try:
        with serving.client() as client:
            stream = client.completions.create(**LONG)
            next(stream)
            with stopped(serving.worker):  # the stream cannot end before the refusals
                serving.process.send_signal(signal.SIGTERM)
                serving.wait_draining()
                assert serving.get("/health")[0] == 503
                with pytest.raises(openai.InternalServerError) as error:
                    client.chat.completions.create(**CHAT)
            assert (error.value.status_code, error.value.response.headers["retry-after"]) == (503, "1")
            assert list(stream)[-1].choices[0].finish_reason == "length"
        assert serving.wait()[0] == 0
    finally:
        serving.close()
