"""`initialize` around a model that `peft` wrapped: every ZeRO stage trains the adapters, and peft saves them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tk.tests.rank_pool import RankPool
from tk.tests.train.frozen_steps import OPTIMIZER, batch, small_llama, steps_of_engine, steps_of_torch
from tk.train import initialize

# peft 0.21 asks transformers 5 for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def wrapped(head: bool) -> Any:
    """Returns a model with adapters on all linears but the head, whose B is not zero; `head`: it is trained, too."""
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        modules_to_save=["lm_head"] if head else None,
        init_lora_weights=False,
    )
    return get_peft_model(small_llama(), options)


def train_adapters(zero: Any, checkpointing: bool, head: bool, save: str) -> dict[str, Any]:
    """Returns what `steps_of_engine` does; peft saves the adapters."""
    model = wrapped(head)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    engine = initialize(model, OPTIMIZER, zero=zero, bucket_size=1500)
    found = steps_of_engine(engine)
    if head:  # peft takes `modules_to_save` from the module itself
        with engine.full_parameters():
            if dist.get_rank() == 0:
                model.save_pretrained(save)
    else:
        state = engine.state_dict()
        if dist.get_rank() == 0:
            model.save_pretrained(save, state_dict=state)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_adapters_of_peft_train_as_torch_trains_them_and_load_into_peft(
    rank_pool: RankPool, tmp_path: Path, zero: int, checkpointing: bool, head: bool
) -> None:
    from peft import PeftModel

    plain = wrapped(head)
    losses = steps_of_torch(plain)
    folder = str(tmp_path / "adapters")
    options = {"zero": zero, "checkpointing": checkpointing, "head": head}
    for result in rank_pool.run(train_adapters, 2, **options, save=folder):
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
        assert zero < 3 or max(result["held"]) < 100, "between passes a rank has its part of the base alone"
    loaded = PeftModel.from_pretrained(small_llama(), folder)
    with torch.no_grad():
        expected, found, bare = (each(input_ids=batch(9)).logits for each in (plain, loaded, small_llama()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, bare, rtol=1e-2, atol=1e-2), "the adapters matter"
