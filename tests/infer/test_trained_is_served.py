"""Log-probabilities of 1,000 tokens with an adapter: of training's decoder, of the server and of `peft`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tk.checkpoint import Checkpoint
from tk.infer import LLM, SamplingParams
from tk.model.adapter_export import prepare_peft_export
from tk.model.stored_adapter import StoredAdapter
from tk.model.stored_config import stored_config
from tk.tests.infer.adapters import make_adapter, scores, trained_scores
from tk.tests.rank_pool import RankPool

pytestmark = [  # peft 0.21 asks transformers 5 for an attribute by its old name
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
]
VOCAB, LENGTH = 264, 1001


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads 2 and 3 ranks can share."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("tp", "kernels"),
    [
        pytest.param(tp, kernels, marks=() if (tp, kernels) == (2, "native") else pytest.mark.matrix)
        for tp in (1, 2, 3)
        for kernels in ("native", "aten")
    ],
)
def test_a_thousand_tokens_have_the_log_probabilities_of_training_and_of_peft(
    rank_pool: RankPool, base: Path, tmp_path: Path, tp: int, kernels: str
) -> None:
    adapter = make_adapter(tmp_path / "run", base, seed=1, rank=8)
    tokens: list[int] = np.random.default_rng(1).integers(0, VOCAB, LENGTH).tolist()
    trained = rank_pool.run(trained_scores, tp, base=str(base), adapter=str(adapter), tokens=tokens)
    assert all(each == trained[0] for each in trained)
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    with LLM(base, tp=tp, kernels=kernels, adapters={"a": adapter}, max_model_len=1024, kv_blocks=80) as llm:
        [completion] = llm.generate([tokens], params, adapter="a")
        [without] = llm.generate([tokens], params)
    served, plain = (np.array([each.logprob for each in one.prompt_logprobs[1:]]) for one in (completion, without))
    np.testing.assert_allclose(served, trained[0], rtol=0, atol=1e-5)
    assert np.abs(served - plain).mean() > 0.01, "the adapter changes what the base says"
    np.testing.assert_allclose(trained[0], scores_of_peft(base, adapter, tmp_path / "peft", tokens), rtol=0, atol=1e-5)


def scores_of_peft(base: Path, adapter: Path, folder: Path, tokens: list[int]) -> np.ndarray:
    """Returns what `peft` finds with the folder that we write for it."""
    stored, config = StoredAdapter.of(Checkpoint.open(adapter)), stored_config(Checkpoint.open(base))
    prepare_peft_export(stored, config, folder).run()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    with torch.no_grad():
        return scores(model(torch.tensor([tokens])).logits[0].numpy(), tokens)
