"""What is served is held in memory: no change of the served folder's files changes an answer, or ends one."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.checkpoint.convert.reshard import reshard
from tk.core.layout import Layout
from tk.infer.client.client import Client
from tk.infer.engine.request.prompts import Conversation
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.model.config import ModelConfig
from tk.model.registry import tensor_table
from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)
SHAPED = SamplingParams(temperature=0.0, max_new_tokens=12, regex="[a-f]{3,9}")
CHAT = Conversation([{"role": "user", "content": "hi"}])
TEMPLATE = "{{ eos_token }}{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PROMPT_TOKENS = 1 + len("<b>user: hi\n")  # of the conversation in the template; the end of text is one token
FILES = {
    "tokenizer_config.json": json.dumps({"eos_token": "<|end|>", "bos_token": "<b>", "chat_template": "in the config"}),
    "special_tokens_map.json": json.dumps({"eos_token": "<|end|>"}),
    "generation_config.json": json.dumps({"eos_token_id": [256, 7]}),
    "chat_template.jinja": TEMPLATE,
    "additional_chat_templates/tool_use.jinja": "with tools",
}


def other_content(path: Path) -> bytes:
    """Other bytes, of a file that could be read."""
    if path.suffix == ".jinja":
        return b"edited {{ messages[0].content }}"
    if path.name == "tokenizer_config.json":
        return json.dumps({"eos_token": "a", "chat_template": "edited"}).encode()
    if path.name in ("config.json", "generation_config.json"):
        return json.dumps(json.loads(path.read_bytes()) | {"eos_token_id": [97, 98]}).encode()
    return bytes(byte ^ 1 for byte in path.read_bytes())


def edit(path: Path) -> None:
    content = other_content(path)
    with path.open("r+b") as file:  # the same file, as an editor in place or a careless copy leaves it
        file.write(content)
        file.truncate()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(other_content(path))
    new.replace(path)


CHANGES: tuple[Callable[[Path], None], ...] = (edit, truncate, delete, replace)


def answers(serving: Serving, client: Client, worker: int) -> list[object]:
    """What a server says in every way that depends on its files; the template's process starts anew."""
    for process in set(serving.worker_ids()) - {worker}:
        os.kill(process, signal.SIGKILL)
    said: list[object] = [client.tokenize("grüße"), client.detokenize([1, 2, 256]), client.model_info()]
    for prompt, params in (("a", GREEDY), (CHAT, GREEDY), ("a", SHAPED)):
        [completion] = client.generate([prompt], params)
        said += [completion.text, completion.token_ids, completion.finish_reason, completion.usage.prompt_tokens]
    score = client.score("a", "bc")
    return [*said, score.token_ids, score.logprobs]


def write_hugging_face(folder: Path) -> Path:
    write_tiny_model(folder)
    (folder / "additional_chat_templates").mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made = write_hugging_face(tmp_path / "tiny-llama")
    if request.param == "step":
        table = tensor_table(ModelConfig.from_folder(made))
        made = reshard(made, tmp_path / "run" / "step-00000000", layout=Layout(), table=table)
    return made


@pytest.mark.parametrize(
    ("folder", "kernels", "all_changes"),
    [
        ("huggingface", "auto", False),
        pytest.param("huggingface", "auto", True, marks=pytest.mark.matrix),
        pytest.param("huggingface", "aten", True, marks=pytest.mark.matrix),
        pytest.param("step", "auto", True, marks=pytest.mark.matrix),
    ],
    indirect=["folder"],
)
def test_no_change_of_a_file_changes_an_answer(folder: Path, kernels: str, all_changes: bool, tmp_path: Path) -> None:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"config.json", "tokenizer.json", *FILES} <= found
    names = ["chat_template.jinja", *sorted(found - {"chat_template.jinja"})]  # changed before anything is asked
    expected: list[object] = []
    serving = Serving(str(folder), "--kv-blocks", "64", "--kernels", kernels).wait_ready()
    try:
        [worker] = serving.worker_ids()
        with Client(serving.target) as client:
            for number, name in enumerate(names):
                for change in CHANGES if all_changes else (CHANGES[number % len(CHANGES)],):
                    shutil.copy2(folder / name, tmp_path / "kept")
                    change(folder / name)
                    said = answers(serving, client, worker)
                    assert PROMPT_TOKENS in said
                    assert said == (expected := expected or said), f"{change.__name__} {name}"
                    (folder / name).unlink(missing_ok=True)
                    shutil.move(tmp_path / "kept", folder / name)
    finally:
        serving.close()
