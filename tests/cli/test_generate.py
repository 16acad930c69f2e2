"""`tk generate` against a server over a scripted engine: options, input, output and exit codes."""

import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tk.cli.main import main
from tk.core.errors import InvalidRequest
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread
from tk.text.tokenizer import Tokenizer


def test_options_are_the_wires_and_text_goes_to_stdout(
    server: ServerThread, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-new-tokens", "9", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.25", "--seed", "7"]
    assert main(["generate", server.target, "hi", *options]) == 0
    assert capsys.readouterr().out == "abc\n"
    [request] = engine.requests
    assert request.prompt == (1, 104, 105)
    assert request.params == SamplingParams(max_new_tokens=9, temperature=0.5, top_k=3, top_p=0.25, seed=7)


def test_a_prompt_can_be_computed_whole(server: ServerThread, engine: FakeEngine) -> None:
    for more in ([], ["--no-prefix-cache"], ["--no-prefix-cache", "--json"]):
        assert main(["generate", server.target, "hi", *more]) == 0
    assert [request.cache.bypass for request in engine.requests] == [False, True, True]


def test_without_options_the_defaults_are_those_of_the_wire(server: ServerThread, engine: FakeEngine) -> None:
    assert main(["generate", server.target, "hi"]) == 0
    assert engine.requests[0].params == SamplingParams()


def test_json_is_one_document_with_the_answer(server: ServerThread, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", server.target, "hi", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["prompt"], document["text"], document["finish_reason"]) == ("hi", "abc", "length")
    assert document["usage"] == {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 3} | dict.fromkeys(
        ("proposed_tokens", "accepted_tokens"), 0
    )
    assert (document["model"]["step"], document["model"]["manifest_sha256"]) == (7, "ab" * 32)
    assert document["model"]["kernels"] == "aten"


def test_prompt_from_stdin_loses_its_last_newline_only(
    server: ServerThread, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n\n"))
    assert main(["generate", server.target]) == 0
    assert bytes(engine.requests[0].token_ids[1:]) == b"a\nb\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{target}", "hi", "--temperature", "-1"], 2, "--temperature"),
        (["{target}", "hi", "--top-p", "0"], 2, "--top-p"),
        (["{target}", "hi", "--kernels", "aten"], 2, "--kernels is for a CKPT; the server at {target}"),
        (["{target}", "hi", "--kv-dtype", "int8"], 2, "--kv-dtype is for a CKPT"),
        (["{target}", "hi", "--max-model-len", "9"], 2, "--max-model-len is for a CKPT"),
        (["{target}", "hi", "--chat"], 1, "has no chat template"),
        (["{target}", "hi", "--threads", "0"], 2, "--threads"),
        (["{target}", "refuse"], 2, "seed is wrong"),
        (["{closed}", "hi"], 1, "{closed}"),
        (["no/such/folder", "hi"], 3, "no/such/folder"),
    ],
)
def test_exit_codes(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], code: int, words: str
) -> None:
    engine.refusal = InvalidRequest("seed is wrong", field="seed")
    closed, server = ServerThread(engine), ServerThread(engine)
    closed.close()
    names = {"target": server.target, "closed": closed.target}
    try:
        assert main(["generate", *(argument.format(**names) for argument in arguments)]) == code
    finally:
        server.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words.format(**names) in captured.err
    assert "Traceback" not in captured.err


def test_a_closed_stdin_is_a_usage_error(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # as Python starts where its standard input is closed
    assert main(["generate", server.target]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: There is no prompt, and stdin is closed")
    assert error.count("\n") == 1


def test_no_prompt_at_all_is_a_usage_error(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["generate", server.target]) == 2
    assert "The prompt is empty" in capsys.readouterr().err


def test_a_checkpoint_is_loaded_as_the_options_say(
    model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--threads",
        "1",
        "--dtype",
        "bf16",
        "--kv-dtype",
        "int8",
        "--kv-memory",
        "1MiB",
        "--max-model-len",
        "64",
        "--kernels",
        "aten",
    ]
    assert main(["generate", str(model_folder("grouped")), "abc", "--seed", "1", "--json", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    model = document["model"]
    assert (model["tp"], model["dtype"], model["kv_dtype"]) == (1, "bf16", "int8")
    assert (model["max_model_len"], model["kernels"]) == (64, "aten")
    assert model["num_blocks"] * model["block_size"] * model["kv_bytes_per_token"] <= 1 << 20


def test_chat_renders_the_template_and_adds_no_other_special_tokens(
    model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("grouped"), folder)
    arguments = ["generate", str(folder), "abc on", "--json", "--max-new-tokens", "3", "--threads", "1"]
    assert main([*arguments, "--chat"]) == 3
    assert "has no chat template" in capsys.readouterr().err
    (folder / "chat_template.jinja").write_text("{{ raise_exception('begin with a system message') }}")
    assert main([*arguments, "--chat"]) == 2
    assert (
        f"{folder}: the chat template refuses these messages: begin with a system message." in capsys.readouterr().err
    )
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    template += "{% if add_generation_prompt %}<a>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    assert main([*arguments, "--chat"]) == 0
    document = json.loads(capsys.readouterr().out)
    ids = Tokenizer.from_folder(folder).encode("<user>abc on<end><a>", special_tokens=False)
    assert document["prompt"] == "abc on"
    assert document["usage"]["prompt_tokens"] == len(ids)
    assert len(document["token_ids"]) <= 3
