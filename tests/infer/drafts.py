"""Draft models for tests: copies of tiny models with other weights, which choose the same token now and then."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tk.infer.engine.schedule.proposing import draft_policy
from tk.infer.engine.schedule.proposing.draft_policy import DraftPolicy


def draft_of(model: Path, folder: Path, noise: float = 0.05, seed: int = 0) -> Path:
    """Makes a copy of a Hugging Face folder whose weights differ from the model's by some noise."""
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    weights, chance = load_file(path), torch.Generator().manual_seed(seed)
    noisy = {
        name: each + noise * each.std() * torch.randn(each.shape, generator=chance) for name, each in weights.items()
    }
    save_file(noisy, path, {"format": "pt"})
    return folder


def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets engines that start from now on draft as many tokens as they may, whatever steps cost."""
    monkeypatch.setattr(DraftPolicy, "_best_count", lambda policy, *given: policy._most)
    monkeypatch.setattr(draft_policy, "_PATIENCE", float("inf"))
    monkeypatch.setattr(DraftPolicy, "chance", lambda policy, record: 1.0)
