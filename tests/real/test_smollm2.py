"""A trained chat model, SmolLM2-135M-Instruct, served: its conversations' tokens, and an answer over gRPC."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tk.infer.client.client import Client
from tk.infer.engine.request.events import FinishReason
from tk.infer.engine.request.prompts import Conversation
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.serve.serving import Serving

pytestmark = pytest.mark.real
QUESTION = {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}
CONVERSATIONS = [
    [QUESTION],
    [{"role": "system", "content": "You are terse."}, QUESTION],
    [QUESTION, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": " Grüße, 東京 <b>&amp;</b>?\n"}],
]


@pytest.fixture(scope="module")
def served(smollm: Path) -> Iterator[Serving]:
    serving = Serving(str(smollm), "--max-running", "4", "--max-model-len", "1024").wait_ready()
    yield serving
    serving.close()


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_conversation_has_the_tokens_of_transformers(
    served: Serving, smollm: Path, messages: list[dict[str, str]]
) -> None:
    """Log-probabilities of the prompt come with the tokens that the server has made of it."""
    expected = AutoTokenizer.from_pretrained(smollm).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    with Client(served.target) as client:
        [completion] = client.generate(Conversation(messages), SamplingParams(max_new_tokens=1, prompt_logprobs=0))
    assert [each.token_id for each in completion.prompt_logprobs] == list(expected)


def test_it_answers_a_question(served: Serving) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=40)
    with Client(served.target) as client:
        [completion] = client.generate(Conversation([QUESTION]), params)
        streamed = "".join(delta.text for delta in client.stream(Conversation([QUESTION]), params))
    assert "Paris" in completion.text
    assert completion.finish_reason is FinishReason.EOS
    assert streamed == completion.text
