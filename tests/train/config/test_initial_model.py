"""`[model] init`: a step of tk from any checkpoint equals the step of `transformers` and torch."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tk.checkpoint.read.reader import Checkpoint
from tk.cli.main import main
from tk.core.config import load_toml, parse
from tk.core.errors import CheckpointError, ConfigError
from tk.data.batches import global_batch
from tk.model.config import ModelConfig
from tk.tests.model.architectures import ENTRIES
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training
from tk.text.tokenizer import Tokenizer
from tk.train.config.initial_model import GivenModel, resolve, unsupported_options
from tk.train.config.sections import ModelSection
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

LR, EPS, DECAY = 1e-3, 1e-8, 0.1


def _hugging_face(folder: Path, name: str, tokenizer: Path, vocab_size: int = 301, **options: Any) -> Any:
    """Saves a random model with the corpus's tokenizer to `folder` and returns it."""
    entry = ENTRIES[name]
    config = entry.make_config()
    config.vocab_size = vocab_size
    for key, value in options.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = entry.model(config)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
    return model


@pytest.fixture
def from_init(configure: Configure) -> Callable[..., dict[str, Any]]:
    """Returns a function that makes a TrainConfig, as plain data, with a checkpoint as `model.init`."""

    def make(init: Path, run: str, **sections: dict[str, Any]) -> dict[str, Any]:
        train = {"steps": 1, "seq_len": 24} | sections.pop("train", {})
        config = configure(run, train=train, **sections)
        config["optimizer"] = {"lr": LR, "eps": EPS, "weight_decay": DECAY, "grad_clip": 1.0, "warmup_steps": 0}
        return config | {"model": {"init": str(init)}, "data": {"sources": config["data"]["sources"]}}

    return make


def _torch_step(folder: Path, config: dict[str, Any]) -> tuple[float, float, dict[str, torch.Tensor], dict[str, Any]]:
    """Returns loss, gradient norm, gradients and updated parameters of one AdamW step of transformers and torch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = global_batch(Trainer(parse(config, TrainConfig, "test")).inputs.train, 0, 6, 0, 1, 6)[0]
    logits = model(torch.from_numpy(batch.inputs)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS).step()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return float(loss.detach()), norm, gradients, parameters


@pytest.mark.parametrize("name", ["llama3", "gpt2", "qwen2", "qwen3"])
def test_a_step_equals_that_of_transformers_and_torch(
    rank_pool: RankPool, corpus: Path, from_init: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "hf"
    _hugging_face(folder, name, corpus / "tokenizer")
    loss, norm, gradients, parameters = _torch_step(folder, from_init(folder, "unused"))
    everything = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    for tp in (1, 2):
        config = from_init(folder, f"tp{tp}", parallel={"tp": tp})
        for result in rank_pool.run(run_training, tp, config=config):
            np.testing.assert_allclose(result["loss"], [loss], rtol=1e-5)
            np.testing.assert_allclose(result["grad_norm"], [norm], rtol=1e-5)
        step = Checkpoint.open(tmp_path / f"tp{tp}")
        assert step.step == 1
        for key, gradient in gradients.items():
            ours = step.read(key, slot="exp_avg").torch() / 0.1  # (1 - beta1) x the clipped gradient
            assert (ours - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * everything, key
            # A first step of Adam is lr x sign(gradient), and rounding decides the sign of a gradient near 0.
            certain = gradient.abs() > 1e-4 * gradient.abs().max()
            torch.testing.assert_close(step.read(key).torch()[certain], parameters[key].detach()[certain])
        assert Tokenizer.from_folder(step.path).sha256 == Tokenizer.from_folder(folder).sha256


def _still(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration with a learning rate at which steps change no weight."""
    return config | {"optimizer": config["optimizer"] | {"lr": 1e-30, "weight_decay": 0.0}}


def test_options_that_tk_does_not_support_are_reported(
    corpus: Path, from_init: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "hf"
    _hugging_face(folder, "llama3", corpus / "tokenizer", attention_dropout=0.1, pad_token_id=3)
    Trainer(parse(from_init(folder, "run"), TrainConfig, "test")).fit()
    errors = caplog.text
    assert errors.count("attention_dropout = 0.1: tk trains without dropout") == 1
    assert errors.count("pad_token_id = 3: transformers does not train that row") == 1
    gpt2 = {"model_type": "gpt2", "resid_pdrop": 0.1, "embd_pdrop": 0, "summary_first_dropout": 0.1, "pad_token_id": 0}
    assert unsupported_options(gpt2) == ["resid_pdrop = 0.1: tk trains without dropout"]
    noisy = {"model_type": "mixtral", "router_jitter_noise": 0.01}
    assert unsupported_options(noisy) == ["router_jitter_noise = 0.01: tk trains without noise in the routers' input"]
    assert unsupported_options({"attention_dropout": 0.0, "pad_token_id": None, "router_jitter_noise": 0.0}) == []


def test_weights_are_loaded_at_full_precision(corpus: Path, from_init: Callable[..., Any], tmp_path: Path) -> None:
    """fp32 weights become fp32 masters of a bf16 run; a bf16 checkpoint starts an fp32 run."""
    full, half = tmp_path / "full", tmp_path / "half"
    model = _hugging_face(full, "llama3", corpus / "tokenizer")
    shutil.copytree(full, half)
    model.bfloat16().save_pretrained(half)
    name = "model.layers.0.mlp.down_proj.weight"
    for source, precision, slot in ((full, "bf16", "master"), (half, "fp32", "weight")):
        run_training(_still(from_init(source, precision, precision={"params": precision})))
        stored = Checkpoint.open(tmp_path / precision).read(name, slot=slot).torch()
        assert torch.equal(stored, Checkpoint.open(source).read(name).torch().float())


def test_a_run_goes_on_without_its_init(corpus: Path, from_init: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    _hugging_face(folder, "llama3", corpus / "tokenizer")
    whole = run_training(from_init(folder, "whole", train={"steps": 4}))["loss"]
    constant = {"steps": 4}
    stopped = from_init(folder, "stopped", train=constant, checkpoint={"every": 2})
    run_training(stopped)
    for path in (tmp_path / "stopped").glob("step-00000004/COMMIT"):
        path.unlink()
    shutil.rmtree(folder)
    assert run_training(stopped)["loss"] == whole[2:]
    with pytest.raises(CheckpointError, match=r"\[model\] init: .*hf does not exist"):
        run_training(from_init(folder, "another"))


def test_a_run_folder_of_tk_can_be_the_init(
    configure: Configure, from_init: Callable[..., Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    base = configure("base", parallel={"tp": 2}, zero={"stage": 1}, train={"steps": 2})
    rank_pool.run(run_training, 2, config=base)
    run_training(_still(from_init(tmp_path / "base", "tuned", train={"steps": 2})))
    begun = Checkpoint.open(tmp_path / "base")
    tuned = Checkpoint.open(tmp_path / "tuned")
    assert (tuned.step, tuned.resume["optimizer_step"], tuned.resume["samples"]) == (2, 2, 12), "only weights are taken"
    assert tuned.config() == begun.config()
    for name in begun.tensors:
        assert torch.equal(tuned.read(name).torch(), begun.read(name).torch()), name


def test_a_shape_beside_init_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"leave out hidden_size, vocab_size, or init") as refusal:
        parse({"model": {"init": "x", "hidden_size": 3, "vocab_size": 4}, "checkpoint": {"dir": "d"}}, TrainConfig, "f")
    assert "'model'" in str(refusal.value)


def test_a_checkpoint_that_does_not_fit_the_configuration_is_refused(
    corpus: Path, from_init: Callable[..., Any], write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    _hugging_face(small, "llama3", corpus / "tokenizer", vocab_size=101)
    with pytest.raises(ConfigError, match=r"has 301 tokens, more than the vocabulary of 101 of \[model\] init = "):
        Trainer(parse(from_init(small, "run"), TrainConfig, "test"))
    with pytest.raises(ConfigError, match=r"train.seq_len = 65 exceeds max_position_embeddings = 64 of .*small"):
        resolve(parse(from_init(small, "run", train={"seq_len": 65}), TrainConfig, "test"), "auto")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"\[model\] init: .*empty holds no checkpoint"):
        resolve(parse(from_init(tmp_path / "empty", "run"), TrainConfig, "test"), "auto")


def test_the_plan_uses_the_shape_of_the_checkpoint(
    corpus: Path,
    from_init: Callable[..., Any],
    write_toml: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "hf"
    _hugging_face(folder, "qwen2", corpus / "tokenizer")
    path = write_toml(from_init(folder, "run", parallel={"tp": 2}))
    assert main(["train", str(path), "--dry-run"]) == 0
    assert "qwen2" in capsys.readouterr().out
    assert main(["train", str(path), "--dry-run", "--set", "parallel.tp=3"]) == 2
    assert "num_attention_heads % tp = 8 % 3" in capsys.readouterr().err
    loaded = load_toml(path, TrainConfig)
    given = resolve(loaded, "auto")
    assert (given.keys.architecture, given.keys.vocab_size, given.tokenizer) == ("qwen2", 301, folder)
    written = json.loads(json.dumps(loaded.model_dump(mode="json")))
    assert written["model"] == {"init": str(folder)}, "ranks receive the section as it was written"
    assert parse(written, TrainConfig, "ranks") == loaded


def test_a_complete_shape_fills_in_unset_keys() -> None:
    found = GivenModel(ModelSection(hidden_size=128), None).complete(301, {7, 2}, "bf16")
    assert type(found) is ModelConfig
    assert (found.hidden_size, found.vocab_size, found.eos_token_id, found.dtype) == (128, 301, (2, 7), "bfloat16")
    given = GivenModel(ModelSection(vocab_size=512, eos_token_id=(5,)), None).complete(301, {7}, "fp32")
    assert (given.vocab_size, given.eos_token_id, given.dtype) == (512, (5,), "float32")


def test_the_tokenizer_is_the_configured_one_or_that_of_the_checkpoint(
    corpus: Path, from_init: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    _hugging_face(folder, "llama3", corpus / "tokenizer")
    config = parse(from_init(folder, "run"), TrainConfig, "test")
    assert resolve(config, "auto").tokenizer == folder
    (folder / "tokenizer.json").unlink()
    assert resolve(config, "auto").tokenizer is None
    data = config.data.model_copy(update={"tokenizer": "elsewhere"})
    assert resolve(config.model_copy(update={"data": data}), "auto").tokenizer == Path("elsewhere")
