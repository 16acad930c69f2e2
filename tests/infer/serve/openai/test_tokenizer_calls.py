"""The tokenizer over HTTP: texts and conversations as tokens and back, special tokens, the template, refusals."""

from pathlib import Path
from typing import Any

import pytest

from tk.tests.infer.serve.fake_engine import ByteTokenizer, FakeEngine
from tk.tests.infer.serve.http.http_server import HttpServerThread
from tk.text.tokenizer_files import TextFiles

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure:"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}{{ mood }}"
)


@pytest.fixture
def tokenizer(engine: FakeEngine) -> ByteTokenizer:
    """The engine's tokenizer, with a chat template."""
    config = b'{"eos_token": {"content": "$"}, "bos_token": "^", "pad_token": null, "other": "x"}'
    files = {"chat_template.jinja": TEMPLATE.encode(), "tokenizer_config.json": config}
    made = ByteTokenizer()
    made.files = TextFiles(Path("a folder"), files)
    engine.tokenizer = made
    return made


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hi"}, [1, 104, 105]),
        ({"prompt": "hi", "add_special_tokens": True, "return_token_strs": False, "model": "fake"}, [1, 104, 105]),
        ({"prompt": "hi", "add_special_tokens": False}, [104, 105]),
        ({"messages": MESSAGES}, list(b"hi$Sure:$>")),
        ({"messages": MESSAGES, "add_generation_prompt": True}, list(b"hi$Sure:$>")),
        ({"messages": MESSAGES, "continue_final_message": True}, list(b"hi$Sure:")),
        (
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": False},
            list(b"hi$Sure:"),
        ),
        ({"messages": MESSAGES[:1], "chat_template_kwargs": {"mood": "!"}}, list(b"hi$>!")),
    ],
)
def test_tokens_of_texts_and_conversations(
    server: HttpServerThread, tokenizer: ByteTokenizer, body: dict[str, Any], tokens: list[int]
) -> None:
    answer = server.ask("/tokenize", body)
    assert answer.json == {"count": len(tokens), "max_model_len": 128, "tokens": tokens, "token_strs": None}
    if "messages" in body:  # the prompt that a call with the same messages computes
        assert server.ask("/v1/chat/completions", body).status == 200


def test_texts_of_tokens(server: HttpServerThread) -> None:
    assert server.ask("/detokenize", {"tokens": [1, 104, 105], "model": "fake"}).json == {"prompt": "\x01hi"}
    assert server.ask("/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_special_tokens_and_the_template(server: HttpServerThread, tokenizer: ByteTokenizer) -> None:
    expected = {"bos_token": "^", "eos_token": "$", "max_model_len": 128, "chat_template": TEMPLATE}
    assert server.ask("/tokenizer_info").json == expected


def test_a_tokenizer_without_a_template_has_none(server: HttpServerThread) -> None:
    assert server.ask("/tokenizer_info").json == {"max_model_len": 128, "chat_template": None}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "hi", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * 129}, "prompt"),
        ("/tokenize", {"prompt": "hi", "add_special_tokens": "no"}, "add_special_tokens"),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "hi", "colour": 1}, "colour"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": 1}, "continue_final_message"),
        ("/tokenize", {"messages": MESSAGES[:1], "continue_final_message": True}, "messages"),
        (
            "/tokenize",
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": []}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"moood": "!"}}, "messages"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1], "colour": "a"}, "colour"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    server: HttpServerThread, tokenizer: ByteTokenizer, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.ask(path, body)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_another_model_and_no_tokenizer(server: HttpServerThread, engine: FakeEngine) -> None:
    assert server.ask("/tokenize", {"prompt": "hi", "model": "other"}).status == 404
    assert server.ask("/detokenize", {"tokens": [1], "model": "other"}).status == 404
    engine.tokenizer = None
    for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [1]}), ("/tokenizer_info", None)):
        assert "no tokenizer" in server.ask(path, body).error["message"]
