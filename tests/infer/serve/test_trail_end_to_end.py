"""A streamed request over HTTP runs each function of the tables in docs/request.md: server and worker are profiled."""

import http.client
import json
from pathlib import Path

import pytest

from tk.tests.house.test_trail import named
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# Python imports `sitecustomize` when it starts: in the worker too, which searches the folders of its parent. A function
# is written down when it is called, or calls another one, while the first byte of the file `on` is not 0.
SITE = """
import mmap, os, sys, threading

folder = os.path.dirname(__file__)
with open(os.path.join(folder, "on"), "rb") as file:
    on = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
written = os.open(os.path.join(folder, "called"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
seen = set()

def record(frame, event, argument):
    if event == "call" and on[0]:
        while frame is not None and frame.f_code not in seen:
            seen.add(frame.f_code)
            os.write(written, f"{frame.f_code.co_filename} {frame.f_code.co_qualname}\\n".encode())
            frame = frame.f_back

sys.setprofile(record)
threading.setprofile(record)
"""


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `sitecustomize`, for processes that start during the test."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "on").write_bytes(b"\0")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_a_streamed_request_runs_each_function_that_the_page_names(profiled: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    options = ("--kv-blocks", "64", "--threads", "1", "--kernels", "native", "--http", "0")
    serving = Serving(str(model), *options).wait_ready()
    try:
        assert serving.process.stdout is not None
        address = serving.process.stdout.readline().split()[1]
        with (profiled / "on").open("r+b") as on:
            on.write(b"\1")
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True, "ignore_eos": True}
        connection = http.client.HTTPConnection(address, timeout=WAIT_SECONDS)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse().read().decode()
        connection.close()
    finally:
        serving.close()
    assert answer.endswith("data: [DONE]\n\n")
    called = {tuple(line.split(maxsplit=1)) for line in (profiled / "called").read_text().splitlines()}
    assert [each for each in sorted(named(ROOT)) if (str(ROOT / each.path), each.name) not in called] == []
