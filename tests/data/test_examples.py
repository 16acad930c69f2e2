"""Fine-tuning data and its masks, with `transformers`' chat templates and assistant masks as the oracle."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tk.cli.main import main
from tk.core.errors import ConfigError
from tk.data.examples import Chat, ExampleEncoder, PromptResponse
from tk.data.prepare import prepare_tokens
from tk.data.sources import find_corpus
from tk.data.token_file import TokenFile
from tk.tests.example_counts import examples
from tk.tests.text.test_chat_template import MESSAGES
from tk.text.chat_template import ChatTemplate
from tk.text.template_files import TemplateSources
from tk.text.tokenizer import Tokenizer

SPECIAL = ["<|start|>", "<|end|>"]
# The two ways to find the assistant's turns, with marks and without; each pair of templates renders the same text.
MARK, DONE = "{% generation %}", "{% endgeneration %}"
TEMPLATES = {
    "a header and an end that is a special token, then a new line": (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m['role'] == 'assistant' %}\n"
        "{{- '<|start|>assistant\\n' }}MARK{{ m['content'] + '<|end|>' }}DONE{{ '\\n' }}\n"
        "    {% else %}\n"
        "{{- '<|start|>' + m['role'] + '\\n' + m['content'] | trim + '<|end|>\\n' }}\n"
        "    {% endif %}\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
    ),
    "no header, the end of text as end": (
        "{% for m in messages %}"
        "{% if m['role'] == 'user' %}{{ '[Q] ' + m['content'] + ' [A]' }}"
        "{% elif m['role'] == 'system' %}{{ m['content'] + '\\n' }}"
        "{% else %}MARK{{ m['content'] + eos_token }}DONE{% endif %}{% endfor %}"
    ),
    "plain words, loop controls and JSON": (
        "{%- for m in messages -%}"
        "{%- if m['role'] == 'system' -%}{{ m | tojson(indent=1) }}{%- continue -%}{%- endif -%}"
        "{%- if m['role'] == 'user' %}You: {{ m['content'] }}\nMe:{% else -%}MARK{{ ' ' + m['content'] + '\\n' }}DONE"
        "{%- endif -%}{%- endfor -%}"
    ),
}


@pytest.fixture(scope="module")
def chat_folder(byte_level_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the byte-level tokenizer, with special tokens for turns."""
    folder = tmp_path_factory.mktemp("chat") / "tokenizer"
    shutil.copytree(byte_level_folder, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["bos_token"] = {"__type": "AddedToken", "content": "<|start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def ours(chat_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(chat_folder)


@pytest.fixture(scope="module")
def theirs(chat_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(chat_folder)


def _templates(name: str) -> tuple[str, str]:
    source = TEMPLATES[name]
    return source.replace("MARK", MARK).replace("DONE", DONE), source.replace("MARK", "").replace("DONE", "")


def _encode(tokenizer: Tokenizer, source: str, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    variables = {"bos_token": "<|start|>", "eos_token": "<|endoftext|>"}
    rendered = ChatTemplate(TemplateSources(source, variables=variables), tokenizer.special_tokens).render(messages)
    return tokenizer.encode_spans(rendered.text, rendered.spans)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
def test_chats_are_as_transformers_has_them(ours: Tokenizer, theirs: Any, name: str, marked: bool) -> None:
    with_marks, without = _templates(name)
    for messages in (MESSAGES, MESSAGES[1:3], MESSAGES[:3], MESSAGES[1:2]):
        expected = theirs.apply_chat_template(
            messages, chat_template=with_marks, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learned = _encode(ours, with_marks if marked else without, messages)
        assert ids == expected["input_ids"]
        assert [int(each) for each in learned] == expected["assistant_masks"]
        assert any(learned) == (len(messages) > 1)


@examples(30)
@given(contents=st.lists(st.text("ab \n.<|>é", max_size=12).map(lambda text: f"{text}!"), min_size=1, max_size=5))
def test_any_words_in_any_number_of_turns(ours: Tokenizer, theirs: Any, contents: list[str]) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(contents)]
    for name in TEMPLATES:
        with_marks, without = _templates(name)
        expected = theirs.apply_chat_template(
            messages, chat_template=with_marks, return_dict=True, return_assistant_tokens_mask=True
        )
        for source in (with_marks, without):
            ids, learned = _encode(ours, source, messages)
            assert ids == expected["input_ids"]
            assert [int(each) for each in learned] == expected["assistant_masks"], name


def test_a_character_of_several_tokens_is_learned_whole(ours: Tokenizer) -> None:
    """`transformers` does not count the later tokens of a character."""
    template = f"{{{{ messages[0]['content'] }}}}{MARK}{{{{ messages[1]['content'] }}}}{DONE}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "☃"}]
    ids, learned = _encode(ours, template, messages)
    assert learned == [False, True, True, True]
    assert len(ids) == 4


def test_a_response_and_its_end_are_learned(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    for tokenizer, start, eos in ((byte_level, [], 0), (byte_fallback, [1], 2)):
        encoder = ExampleEncoder(tokenizer, start, eos)
        ids, learned = encoder.encode(PromptResponse("def f(x):", " return x"))
        num_read = learned.index(True)
        assert ids[:num_read] == tokenizer.encode("def f(x):"), "the prompt must be encoded like a request's"
        assert learned == [False] * num_read + [True] * (len(ids) - num_read)
        assert ids[-1] == eos
        assert tokenizer.decode(ids) == "def f(x): return x"
    prompt = byte_level.encode("ret")
    assert byte_level.encode("return")[: len(prompt)] != prompt, "otherwise the test proves nothing"
    ids, learned = ExampleEncoder(byte_level, [], 0).encode(PromptResponse("ret", "urn"))
    assert ids[: learned.index(True)] == prompt


def _lines(path: Path, *items: object) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_lines_of_all_kinds_become_tokens_and_a_mask(
    chat_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(chat_folder, tmp_path / "tokenizer")
    name = next(iter(TEMPLATES))
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(_templates(name)[1])
    path = _lines(
        tmp_path / "all.jsonl",
        {"text": "a text"},
        {"prompt": "1 + 1 =", "response": " 2"},
        {"messages": MESSAGES},
        {"text": "another"},
    )
    words = ["data", "prepare", str(path), "--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert "learned: " in capsys.readouterr().err
    tokens, tokenizer = TokenFile(tmp_path / "out"), Tokenizer.from_folder(chat_folder)
    tokens.verify()
    learned = [
        tokenizer.decode([token for token, each in zip(ids, mask, strict=True) if each], skip_special_tokens=False)
        for ids, mask in (
            (tokens.read(start, stop).tolist(), tokens.learned(start, stop))
            for start, stop in zip(tokens.document_offsets[:-1], tokens.document_offsets[1:], strict=True)
        )
    ]
    end = "<|endoftext|>"
    said = "".join(f"{message['content']}<|end|>" for message in MESSAGES if message["role"] == "assistant")
    assert learned == [f"a text{end}", f" 2{end}", said, f"another{end}"]
    assert (tmp_path / "out" / "chat_template.jinja").is_file()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "a"}, '"response" must be a string, but it is missing'),
        ({"prompt": 1, "response": "b"}, '"prompt" must be a string, but it is int'),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "x"}]}, 'message 1 must be an object with a string "role"'),
        ({"messages": "x"}, "must be a list"),
        ({"prompt": "\ud800", "response": ""}, "not valid Unicode"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: object, said: str) -> None:
    path = _lines(tmp_path / "bad.jsonl", {"prompt": "a", "response": "b"}, line)
    with pytest.raises(ConfigError, match=said) as refusal:
        list(find_corpus([path]).documents())
    assert str(refusal.value).startswith(f"{path}:2: ")


def test_a_refused_conversation_is_named(chat_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(chat_folder, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    chat = Chat(({"role": "system", "content": "x"},), "chats.jsonl:7")
    with pytest.raises(ConfigError, match=r"chats\.jsonl:7: .*no system role"):
        prepare_tokens([chat], Tokenizer.from_folder(tmp_path / "tokenizer"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_texts_for_a_tokenizer_are_the_contents_of_examples(tmp_path: Path) -> None:
    path = _lines(tmp_path / "all.jsonl", {"text": "a"}, {"prompt": "b", "response": "c"}, {"messages": MESSAGES[1:3]})
    texts = list(find_corpus([path]).texts())
    assert texts[:2] == ["a", "bc"]
    assert texts[2] == f"{MESSAGES[1]['content']}\n{MESSAGES[2]['content']}"
