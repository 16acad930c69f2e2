"""`tk serve` as its own process over a real engine and a tiny model: from the ready line to the exit code."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import PreTrainedTokenizerFast

from tk.cli.generate import generate
from tk.cli.main import main
from tk.cli.serve import serve
from tk.core.dtypes import COMPUTE_NAMES
from tk.core.errors import InvalidRequest
from tk.infer.client.client import AsyncClient, Client
from tk.infer.client.connection import Unavailable
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kv_formats import KV_DTYPES
from tk.infer.engine.llm import LLM
from tk.infer.engine.options import KERNELS, WEIGHT_DTYPES
from tk.infer.engine.request.events import FinishReason, PromptLogprobs, Started
from tk.infer.engine.request.prompts import Conversation
from tk.infer.engine.request.request import CacheOptions
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.open_inference.conftest import Calls, asking, texts
from tk.tests.infer.serve.serving import Serving, stopped
from tk.tests.infer.serve.tiny_model import MAX_LENGTH, write_tiny_model

WAIT_SECONDS = 60.0
TEMPLATE = "{% for m in messages %}<|end|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Serving]:
    """A server that tests leave as they find it."""
    serving = Serving(str(model), "--kv-blocks", "64").wait_ready()
    yield serving
    serving.close()


@pytest.fixture
def own(model: Path, request: pytest.FixtureRequest) -> Iterator[Serving]:
    """A server for one test, that may end it; one rank, or as many as the test's parameter says."""
    tp = getattr(request, "param", 1)
    serving = Serving(str(model), "--kv-blocks", "64", "--kv-dtype", "int8", "--tp", str(tp)).wait_ready()
    yield serving
    serving.close()


def test_together_and_alone_streamed_and_at_once_give_the_same_text(shared: Serving) -> None:
    prompts = ["def main():", "import os", "x"]
    with Client(shared.target) as client:
        together = client.generate(prompts, GREEDY)
        for prompt, completion in zip(prompts, together, strict=True):
            deltas = list(client.stream(prompt, GREEDY))
            assert "".join(delta.text for delta in deltas) == completion.text
            assert [token for delta in deltas for token in delta.token_ids] == list(completion.token_ids)
            assert len(completion.token_ids) == 12
            assert completion.finish_reason is FinishReason.LENGTH
            assert completion.usage.prompt_tokens == len(client.tokenize(prompt))
        assert client.detokenize(client.tokenize("grüße")) == "grüße"
        [letter] = client.tokenize("h")
        assert client.detokenize([260, letter, 2**32 - 1]) == "h", "ids unknown to the tokenizer give no text"


def test_open_inference_gives_the_same_text(shared: Serving) -> None:
    request = asking("def main():", temperature=0.0, max_tokens=12, ignore_eos=True)
    with Client(shared.target) as client, grpc.insecure_channel(shared.target) as channel:
        [expected] = client.generate("def main():", GREEDY)
        calls = Calls(channel)
        whole = calls.ModelInfer(request, timeout=WAIT_SECONDS)
        pieces = [each.infer_response for each in calls.ModelStreamInfer(iter([request]), timeout=WAIT_SECONDS)]
    assert texts(whole) == ["".join(texts(piece)[0] for piece in pieces)] == [expected.text]
    assert texts(whole, "finish_reason") == texts(pieces[-1], "finish_reason") == ["length"]
    assert whole.model_name == "tiny-llama"


def test_model_info_is_as_requested(shared: Serving) -> None:
    with Client(shared.target) as client:
        info = client.model_info()
    assert (info.name, info.architecture, info.tp) == ("tiny-llama", "llama", 1)
    assert (info.dtype, info.kv_dtype, info.num_blocks) == ("fp32", "fp32", 64)
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (MAX_LENGTH, 264, (256,))
    assert len(info.manifest_sha256) == 64


def test_a_started_stream_says_how_many_tokens_were_cached(shared: Serving) -> None:
    def cached(salt: str, bypass: bool = False) -> tuple[int, int, int]:
        request = pb.GenerateRequest(tokens={"ids": range(100)}, cache={"salt": salt, "bypass": bypass})
        request.stopping.max_new_tokens = 2
        first, *_, last = stub.Generate(request, timeout=WAIT_SECONDS)
        usage = stub.GenerateOnce(request, timeout=WAIT_SECONDS).usage
        return first.started.cached_tokens, last.finished.usage.cached_tokens, usage.cached_tokens

    with grpc.insecure_channel(shared.target) as channel:
        stub: Any = GenerationStub(channel)
        assert [cached("a"), cached("a"), cached("b"), cached("b")] == [(0, 0, 96), (96, 96, 96)] * 2
        assert cached("a", bypass=True) == (0, 0, 0)
    with Client(shared.target) as client:
        for salt, expected in (("a", 96), ("c", 0)):
            [found] = client.generate(list(range(100)), GREEDY, CacheOptions(salt=salt))
            assert (found.usage.prompt_tokens, found.usage.cached_tokens) == (100, expected)


@pytest.mark.skipif(not instruction_sets(), reason="no compiler")
def test_a_server_on_native_kernels_loads_no_torch_and_takes_little_memory(shared: Serving) -> None:
    with Client(shared.target) as client:
        assert client.generate("import os", GREEDY)
        assert client.model_info().kernels.startswith("native")
    processes = [shared.process.pid, *shared.worker_ids()]
    assert len(processes) == 2
    assert not any("libtorch" in Path(f"/proc/{process}/maps").read_text() for process in processes)
    status = [Path(f"/proc/{process}/status").read_text().splitlines() for process in processes]
    resident = sum(int(line.split()[1]) << 10 for lines in status for line in lines if line.startswith("VmRSS:"))
    assert resident < 150 << 20, "this model's weights are nothing"


SHAPE = '{"type": "array", "items": {"enum": [1, "two", null]}, "minItems": 2, "maxItems": 4}'


def test_answers_keep_their_constraints(shared: Serving) -> None:
    params = SamplingParams(json_schema=SHAPE, seed=3, n=4)
    with Client(shared.target) as client:
        [completion] = client.generate("a list:", params)
        for choice in completion.choices:
            items = json.loads(choice.text)
            assert 2 <= len(items) <= 4
            assert all(item in (1, "two", None) for item in items)
            assert choice.finish_reason is FinishReason.EOS
        streamed = "".join(delta.text for delta in client.stream("a list:", replace(params, n=1)))
        assert streamed == completion.choices[0].text
        for wrong in (SamplingParams(json_schema="{"), SamplingParams(regex="a("), SamplingParams(grammar="start: b")):
            constraint = wrong.constraint
            assert constraint is not None
            with pytest.raises(InvalidRequest, match="cannot be used") as error:
                client.generate("a list:", wrong)
            assert error.value.field == constraint.kind
            with pytest.raises(InvalidRequest, match="cannot be used"):
                list(client.stream("a list:", wrong))


def test_generate_command_keeps_a_constraint(shared: Serving, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(SHAPE)
    grammar.write_text('start: "yes" | "no"')
    for option, value, words in (
        ("--json-schema", str(schema), r"\[.*\]"),
        ("--regex", "[ab]{3}", "[ab]{3}"),
        ("--grammar", str(grammar), "yes|no"),
    ):
        result = CliRunner().invoke(generate, [shared.target, option, value, "import os"])
        assert result.exit_code == 0
        assert re.fullmatch(words, result.stdout.removesuffix("\n"))
    grammar.write_bytes(b"\xff")
    assert main(["generate", shared.target, "--grammar", str(grammar), "import os"]) == 2


def test_generate_command_streams_from_a_server(shared: Serving) -> None:
    arguments = [shared.target, "--max-new-tokens", "12", "--temperature", "0"]
    with Client(shared.target) as client:
        [expected] = client.generate("import os", SamplingParams(temperature=0.0, max_new_tokens=12))
    runner = CliRunner()
    for result in (
        runner.invoke(generate, [*arguments, "import os"]),
        runner.invoke(generate, arguments, input="import os\n"),
    ):
        assert (result.exit_code, result.stdout) == (0, expected.text + "\n")
    document = json.loads(runner.invoke(generate, [*arguments, "import os", "--json"]).stdout)
    assert (document["text"], document["token_ids"]) == (expected.text, list(expected.token_ids))
    assert document["model"]["num_blocks"] == 64


def test_generate_command_from_a_checkpoint_gives_the_servers_text(
    model: Path, shared: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-new-tokens", "12", "--temperature", "0", "--json"]
    documents = []
    for source in (str(model), shared.target):
        assert main(["generate", source, "import os", *options]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    local, remote = documents
    assert (local["text"], local["token_ids"]) == (remote["text"], remote["token_ids"])
    assert local["model"]["manifest_sha256"] == remote["model"]["manifest_sha256"]
    assert local["model"]["kernels"] == remote["model"]["kernels"] != ""


def test_a_conversation_has_the_same_tokens_everywhere(
    model: Path, shared: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "system", "content": "grüße"}, {"role": "user", "content": " hi <|end|>"}]
    expected = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), chat_template=TEMPLATE)
    ids = expected.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with Client(shared.target) as client:
        from_chat, from_ids = client.generate([Conversation(messages), ids], GREEDY)
        streamed = [token for delta in client.stream(Conversation(messages), GREEDY) for token in delta.token_ids]
    assert from_chat.usage.prompt_tokens == len(ids)
    begun = [*messages, {"role": "assistant", "content": "Sure, "}]
    ids = expected.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    with Client(shared.target) as client, LLM(model) as llm:
        talk = Conversation(begun, continues=True)
        answers = [llm.generate(talk, GREEDY)[0], *client.generate([talk, ids], GREEDY)]
    assert len({answer.token_ids for answer in answers}) == 1
    assert {answer.usage.prompt_tokens for answer in answers} == {len(ids)}
    assert from_chat.token_ids == from_ids.token_ids == tuple(streamed)
    texts = []
    for source in (str(model), shared.target):
        assert main(["generate", source, "hi", "--chat", "--max-new-tokens", "12", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_a_score_is_the_sum_of_the_prompts_own_log_probabilities(shared: Serving) -> None:
    with Client(shared.target) as client, grpc.insecure_channel(shared.target) as channel:
        whole = client.tokenize("import os.path")
        params = SamplingParams(max_new_tokens=1, prompt_logprobs=3)
        [completion] = client.generate([whole], params)
        stub: Any = GenerationStub(channel)
        request = pb.ScoreRequest(text="import ", continuation_text="os.path", top=3)
        answer = stub.Score(request, timeout=WAIT_SECONDS)
    expected = completion.prompt_logprobs[len("import ") :]
    assert [each.token_id for each in answer.logprobs] == [each.token_id for each in expected]
    assert [each.logprob for each in answer.logprobs] == pytest.approx([each.logprob for each in expected], abs=1e-5)
    assert [[top.token_id for top in each.top] for each in answer.logprobs] == [
        [top.token_id for top in each.top] for each in expected
    ]
    assert answer.total == pytest.approx(sum(each.logprob or 0.0 for each in expected), abs=1e-4)


def test_what_ended_a_sample_is_said(shared: Serving) -> None:
    """The end token of the model, a stop token, a stop string, and the limit, from one biased token each."""
    with grpc.insecure_channel(shared.target) as channel:
        stub: Any = GenerationStub(channel)
        for token, stopping, reason, matched in (
            (256, {}, pb.FINISH_REASON_EOS, ("stop_token_id", 256)),
            (256, {"ignore_eos": True}, pb.FINISH_REASON_LENGTH, (None, None)),
            (70, {"stop_token_ids": [70]}, pb.FINISH_REASON_STOP_TOKEN, ("stop_token_id", 70)),
            (70, {"stop": ["gg"]}, pb.FINISH_REASON_STOP_STRING, ("stop", "gg")),
        ):
            request = pb.GenerateRequest(text="a", sampling={"logit_bias": {token: 1000.0}})
            request.stopping.CopyFrom(pb.Stopping(max_new_tokens=3, **stopping))
            [choice] = stub.GenerateOnce(request, timeout=WAIT_SECONDS).choices
            *_, last = stub.Generate(request, timeout=WAIT_SECONDS)
            for end in (choice, last.finished):
                arm = end.WhichOneof("matched")
                assert (end.reason, (arm, getattr(end, arm) if arm else None)) == (reason, matched)


def test_scores_over_the_wire_are_those_of_the_engine(model: Path, shared: Serving) -> None:
    given: list[tuple[Any, Any]] = [
        ("import ", "os.path"),
        ("import ", ["os", "sys.path", [5, 6]]),
        ([1, 2, 3], "x"),
        (np.array([1, 2, 3]), [4]),
        ("x", []),
    ]

    async def scored() -> list[Any]:
        async with AsyncClient(shared.target) as client:
            return [await client.score(*each) for each in given]

    with LLM(model, kv_blocks=64) as llm, Client(shared.target) as client:
        expected = [llm.score(*each) for each in given]
        assert [client.score(*each) for each in given] == expected
        assert asyncio.run(scored()) == expected
        for prompt, after, field in (
            ("", "x", "prompt"),
            ("x", "", "continuation"),
            ("x", [2**31], "continuation"),
            (Conversation([{"role": "user", "content": "x"}]), "x", "prompt"),
        ):
            with pytest.raises(InvalidRequest) as error:
                client.score(prompt, after)  # type: ignore[arg-type]  # a Conversation
            assert error.value.field == field


def test_log_probabilities_of_a_long_prompt_stream_in_parts(shared: Serving) -> None:
    params, prompt = SamplingParams(max_new_tokens=2, prompt_logprobs=2), [1 + index % 250 for index in range(500)]
    with Client(shared.target) as client:
        [whole] = client.generate([prompt], params)
        begin, second, *rest = client.events(prompt, params)
    assert isinstance(begin, Started)
    assert isinstance(second, PromptLogprobs)
    assert (len(begin.prompt_logprobs), second.start) == (256, 256)
    assert (*begin.prompt_logprobs, *second.logprobs) == whole.prompt_logprobs
    assert [entry.token_id for entry in whole.prompt_logprobs] == prompt
    assert not any(isinstance(event, PromptLogprobs) for event in rest)


def test_sigterm_lets_a_live_stream_finish_and_exits_zero_with_its_workers(own: Serving) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=300, ignore_eos=True)
    workers = own.worker_ids()
    assert len(workers) == 1
    with Client(own.target) as client:
        kernels = client.model_info().kernels
        deltas = client.stream("a", params)
        tokens = list(next(deltas).token_ids)
        with stopped(workers[0]):
            own.process.send_signal(signal.SIGTERM)
            own.wait_draining()
        for delta in deltas:
            tokens += delta.token_ids
    assert len(tokens) == 300
    code, stdout, stderr = own.wait()
    assert (code, stdout) == (0, ""), stderr
    assert "draining: 1 live" in stderr
    assert f"\nkernels   {kernels}\nthreads   " in stderr, "lines of the table at start"
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_a_second_ctrl_c_ends_at_once(own: Serving) -> None:
    """Sixteen long samples are live and stay so: the first signal alone would wait for them."""
    stub_channel = grpc.insecure_channel(own.target)
    watch = health_pb2_grpc.HealthStub(stub_channel).Watch(health_pb2.HealthCheckRequest(service="tk.v1.Generation"))
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    with Client(own.target) as client:
        deltas = client.stream("a", SamplingParams(n=16, max_new_tokens=500, ignore_eos=True))
        next(deltas)
        os.kill(own.worker_ids()[0], signal.SIGSTOP)
        own.process.send_signal(signal.SIGINT)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        code, _, stderr = own.end(signal.SIGINT)
        assert code == 130, stderr
        with pytest.raises(Unavailable):
            list(deltas)
    stub_channel.close()


@pytest.mark.parametrize("own", [2], indirect=True)
def test_a_killed_worker_ends_streams_and_readiness(own: Serving) -> None:
    channel = grpc.insecure_channel(own.target)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="tk.v1.Generation"))
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    _, worker = own.worker_ids()
    with Client(own.target, max_attempts=1) as client:
        deltas = client.stream("a", SamplingParams(n=16, max_new_tokens=500, ignore_eos=True))
        next(deltas)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(Unavailable):
            list(deltas)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(Unavailable):
            client.generate("a")
    channel.close()
    code, _, stderr = own.wait()
    assert code == 1, stderr
    assert f"error: Inference rank 1 (process {worker}) was killed by signal 9" in stderr


def test_killed_workers_start_again_behind_the_same_port_and_the_last_death_ends_the_server(model: Path) -> None:
    serving = Serving(str(model), "--kv-blocks", "64", "--tp", "2", "--max-restarts", "1").wait_ready()
    channel = grpc.insecure_channel(serving.target)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="tk.v1.Generation"))
    try:
        with Client(serving.target, max_attempts=1) as client:
            [expected] = client.generate("a", GREEDY)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            workers = serving.worker_ids()
            deltas = client.stream("a", SamplingParams(n=16, max_new_tokens=500, ignore_eos=True))
            next(deltas)
            os.kill(workers[1], signal.SIGKILL)
            with pytest.raises(Unavailable, match="start again") as error:
                list(deltas)
            assert error.value.retry_after is not None
            assert error.value.retry_after >= 1.0
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            assert client.generate("a", GREEDY)[0].token_ids == expected.token_ids
            assert not set(serving.worker_ids()) & set(workers)
            os.kill(serving.worker_ids()[0], signal.SIGKILL)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        code, _, stderr = serving.wait()
        assert code == 1, stderr
        assert "Restart 1 of 1." in stderr
    finally:
        channel.close()
        serving.close()


def test_an_ignored_signal_stays_ignored(model: Path) -> None:
    """A shell starts background jobs so, and nohup."""
    serving = Serving(str(model), "--kv-blocks", "64", ignored=(signal.SIGINT,))
    try:
        while not serving.worker_ids():  # it loads
            assert serving.process.poll() is None
        serving.process.send_signal(signal.SIGINT)
        serving.wait_ready()
        serving.process.send_signal(signal.SIGINT)
        with Client(serving.target) as client:
            assert client.generate("a", GREEDY)
        assert serving.end(signal.SIGTERM)[0] == 0
    finally:
        serving.close()


def test_every_dtype_and_backend_of_the_engine_can_be_asked_for() -> None:
    offered = {
        param.name: param.type.choices
        for param in serve.params
        if isinstance(param.type, click.Choice) and param.expose_value  # of all commands alike is --log-format
    }
    assert offered == {
        "dtype": ("auto", *COMPUTE_NAMES),
        "draft_weight_dtype": ("auto", *WEIGHT_DTYPES),
        "weight_dtype": ("auto", *WEIGHT_DTYPES),
        "kv_dtype": ("auto", *KV_DTYPES),
        "kernels": KERNELS,
    }


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{missing}"], 3, "missing"),
        (["{model}", "--tp", "3"], 2, "tp"),
        (["{model}", "--host", "0.0.0.0"], 2, "--insecure"),
        (["{model}", "--kv-blocks", "4", "--kv-memory", "1MiB"], 2, "kv_memory"),
        (["{model}", "--max-model-len", "100000"], 2, "100000"),
        (["{model}", "--kv-dtype", "int3"], 2, "int3"),
        (["{model}", "--kernels", "cuda"], 2, "--kernels"),
        (["{model}", "--dtype", "fp16", "--kv-dtype", "fp16", "--max-model-len", "100000"], 2, "max_model_len"),
    ],
)
def test_a_model_that_cannot_be_served_ends_in_one_paragraph(
    model: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    words_given = [argument.format(model=model, missing=model / "missing") for argument in arguments]
    exit_code = main(["serve", *words_given, "--port", "0"])
    stdout, stderr = capfd.readouterr()
    assert (exit_code, stdout) == (code, ""), stderr
    assert words in stderr
    assert "Traceback" not in stderr
