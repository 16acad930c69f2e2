"""The text of a continuation by every way out of a server: what its tokens add to the text of the prompt.

The tokenizer is one that strips a space from the beginning of a text, and the model is random.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
import tokenizers

from tk.infer.client.client import Client
from tk.infer.engine.request.completion import Completion
from tk.infer.engine.request.prompts import Conversation
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.random_schemas import is_accepted
from tk.tests.infer.serve.open_inference.conftest import Calls, asking, texts
from tk.tests.infer.serve.openai.test_http_end_to_end import HttpServing
from tk.tests.infer.serve.serving import WAIT_SECONDS
from tk.tests.infer.serve.tiny_model import write_tiny_model
from tk.tests.text.families import tokenizer_of

SCHEMA: dict[str, Any] = {"type": "array", "items": {"enum": [1, "the", None]}, "minItems": 2, "maxItems": 4}
REGEX = r" ?(the |ab|[0-9]){2,5}"
PROMPTS = ("", "the", "the ", "the\n", "café ☃ the")
CHAT = [{"role": "user", "content": "the"}]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    return tokenizer_of("llama2", tmp_path_factory.getbasetemp())[1]


@pytest.fixture(scope="module")
def serving(theirs: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServing]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama", tokenizer=theirs, end=2)
    (folder / "chat_template.jinja").write_text("<s>{{ messages[0].content }}")
    serving = HttpServing(folder)
    yield serving
    serving.close()


@pytest.fixture
def client(serving: HttpServing) -> Iterator[Client]:
    with Client(serving.target) as client:
        yield client


def added(theirs: tokenizers.Tokenizer, prompt: list[int], new: list[int]) -> str:
    before, both = theirs.decode(prompt), theirs.decode([*prompt, *new])
    return both.removeprefix(before)


@pytest.mark.parametrize("schema", [None, SCHEMA])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_way_out_has_the_same_text(
    serving: HttpServing,
    client: Client,
    theirs: tokenizers.Tokenizer,
    prompt: str,
    schema: dict[str, Any] | None,
) -> None:
    shape = None if schema is None else json.dumps(schema)
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=24, json_schema=shape, logprobs=2)
    [completion] = client.generate([prompt], params)
    expected = added(theirs, theirs.encode(prompt).ids, list(completion.token_ids))
    assert completion.text == expected
    assert schema is None or completion.finish_reason.value == "length" or is_accepted(expected, schema)
    assert "".join(delta.text for delta in client.stream(prompt, params)) == expected
    asked: dict[str, Any] = {"prompt": prompt, "temperature": 1.0, "seed": 5, "max_tokens": 24, "logprobs": 2}
    if schema is not None:
        shaped = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema, "strict": True}}
        asked["extra_body"] = {"response_format": shaped}
    with serving.client() as openai:
        whole = openai.completions.create(model="tiny-llama", **asked).choices[0]
        chunks = list(openai.completions.create(model="tiny-llama", **asked, stream=True))
    assert whole.text == expected
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    check_logprobs(completion, whole, [chunk.choices[0].logprobs for chunk in chunks if chunk.choices])
    if prompt and schema is None:
        request = asking(prompt, temperature=1.0, seed=5, max_tokens=24)
        request.model_name = "tiny-llama"
        with grpc.insecure_channel(serving.target) as channel:
            answer = Calls(channel).ModelInfer(request, timeout=WAIT_SECONDS)
        assert texts(answer) == [expected]


def check_logprobs(completion: Completion, whole: Any, pieces: Sequence[Any]) -> None:
    """Checks the log-probabilities of a whole answer and of a stream, over HTTP, against those over gRPC."""
    shown, text = whole.logprobs, completion.text
    assert shown.text_offset == [entry.text_offset for entry in completion.logprobs]
    assert [len(others) for others in shown.top_logprobs] == [len(entry.top) for entry in completion.logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for piece in pieces if piece for each in getattr(piece, name)] == getattr(shown, name)
    for entry, token, place in zip(completion.logprobs, shown.tokens, shown.text_offset, strict=True):
        if token == "</s>":
            assert place == len(text)
        elif token.startswith("bytes:"):
            assert bytes.fromhex(token[6:].replace("\\x", "")) == entry.token
            assert text[place] == "\ufffd" or text[place].encode().find(entry.token[:1]) >= 0
        else:
            assert text[place:].startswith(token) or set(text[place : place + len(token)]) == {"\ufffd"}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_constrained_text_matches(client: Client, theirs: tokenizers.Tokenizer, prompt: str) -> None:
    for seed in range(6):
        [completion] = client.generate([prompt], SamplingParams(seed=seed, max_new_tokens=40, regex=REGEX))
        assert completion.text == added(theirs, theirs.encode(prompt).ids, list(completion.token_ids))
        assert re.fullmatch(REGEX, completion.text)


def test_a_conversation_has_a_text_of_its_own(
    serving: HttpServing, client: Client, theirs: tokenizers.Tokenizer
) -> None:
    [completion] = client.generate([Conversation(CHAT)], SamplingParams(seed=5, max_new_tokens=24, regex=REGEX))
    prompt = theirs.encode("<s>the", add_special_tokens=False).ids
    assert completion.text == added(theirs, prompt, list(completion.token_ids))
    [completion] = client.generate([Conversation(CHAT)], SamplingParams(seed=5, max_new_tokens=24))
    with serving.client() as openai:
        answer = openai.chat.completions.create(model="tiny-llama", messages=CHAT, seed=5, max_tokens=24)
    assert answer.choices[0].message.content == completion.text


def test_a_score_is_of_the_tokens_that_are_not_wholly_in_the_prompt(
    client: Client, theirs: tokenizers.Tokenizer
) -> None:
    whole = theirs.encode("import os").ids
    score = client.score("import ", "os")
    assert [*whole[: score.prompt_tokens], *score.token_ids] == whole
    assert theirs.decode(whole[: score.prompt_tokens]) in ("import", "import ")
