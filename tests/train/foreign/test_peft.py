"""`initialize` around a model that `peft` wrapped: every ZeRO stage trains the adapters, and peft saves them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tk.tests.rank_pool import RankPool
from tk.train import initialize

# peft 0.21 asks transformers 5 for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
STEPS, ROWS = 3, 4


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=False, **sizes))


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
    return get_peft_model(base(), options)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 50, (ROWS, 9), generator=torch.Generator().manual_seed(step))


def resident_bytes(model: nn.Module) -> int:
    """Returns the bytes behind the frozen parameters."""
    with torch._C.DisableTorchFunctionSubclass():  # else it is an error to ask for the memory of an absent one
        frozen = [parameter.untyped_storage() for parameter in model.parameters() if not parameter.requires_grad]
    return sum({storage.data_ptr(): storage.nbytes() for storage in frozen}.values())


def train_adapters(zero: Any, checkpointing: bool, head: bool, save: str) -> dict[str, Any]:
    """Returns the losses of STEPS steps, and the bytes of the base on this rank after each; peft saves the adapters."""
    model = wrapped(head)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    engine = initialize(model, {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.0}, zero=zero, bucket_size=1500)
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    losses, held = [], []
    for step in range(STEPS):
        loss = engine({"input_ids": batch(step)[mine], "labels": batch(step)[mine]})
        engine.backward(loss)
        engine.step()
        total = loss.detach() / world
        dist.all_reduce(total)
        losses.append(float(total))
        held.append(resident_bytes(model))
    if head:  # peft takes `modules_to_save` from the module itself
        with engine.full_parameters():
            if rank == 0:
                model.save_pretrained(save)
    else:
        state = engine.state_dict()
        if rank == 0:
            model.save_pretrained(save, state_dict=state)
    return {"losses": losses, "held": held}


@pytest.mark.matrix
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_adapters_of_peft_train_as_torch_trains_them_and_load_into_peft(
    rank_pool: RankPool, tmp_path: Path, zero: int, checkpointing: bool, head: bool
) -> None:
    from peft import PeftModel

    plain = wrapped(head)
    optimizer = torch.optim.AdamW(
        [each for each in plain.parameters() if each.requires_grad], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for step in range(STEPS):
        loss = plain(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    folder = str(tmp_path / "adapters")
    options = {"zero": zero, "checkpointing": checkpointing, "head": head}
    for result in rank_pool.run(train_adapters, 2, **options, save=folder):
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
        assert zero < 3 or max(result["held"]) < 100, "between passes a rank has its part of the base alone"
    loaded = PeftModel.from_pretrained(base(), folder)
    with torch.no_grad():
        expected, found, bare = (each(input_ids=batch(9)).logits for each in (plain, loaded, base()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, bare, rtol=1e-2, atol=1e-2), "the adapters matter"
