"""A base in codes: training multiplies by what the codes stand for, alike at every layout, and holds no more."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tk.checkpoint import Checkpoint, prepare_export
from tk.core.config import parse
from tk.core.errors import ConfigError
from tk.model.lora.coded import coded_bytes, coded_groupings
from tk.parallel.layers import ColumnParallelLinear, RowParallelLinear
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer, run_training
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"parallel": {"tp": 2, "dp": 1}},
    "sequence parallel": {"parallel": {"tp": 2, "dp": 1, "sequence_parallel": True}},
    "zero 2": {"parallel": {"dp": 2}, "zero": {"stage": 2}},
    "zb-h1, recomputed": {"parallel": {"pp": 2, "dp": 1, "schedule": "zb-h1"}, "recompute": {"mode": "full"}},
    "mlp blocks": {"parallel": {"tp": 2, "dp": 1}, "recompute": {"mlp_block": 5}},
}
LINEAR = (ColumnParallelLinear, RowParallelLinear)
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": {"architecture": "gpt2", "num_key_value_heads": 4}}


def adapting(configure: Configure, init: Path, run: str, base: str, **sections: Any) -> dict[str, Any]:
    """Returns the configuration of a run that adapts some linears of a base; the others have no adapter."""
    lora = {"rank": 4, "targets": r".*(q_proj|down_proj|c_attn|mlp\.c_proj)", "base": base}
    config = configure(run, train={"steps": 3}, lora=lora, **sections)
    config["model"] = {"init": str(init)}
    return config


def make_base(configure: Configure, model: str) -> Path:
    """Returns a plain folder with the weights of a small model."""
    config = configure(f"{model} trained", train={"steps": 1}, model=MODELS[model])
    Trainer(parse(config, TrainConfig, "test")).fit()
    folder = Path(config["checkpoint"]["dir"])
    return prepare_export(Checkpoint.open(folder), folder.with_name(model), plain=True).run()


def widen_stored(trainer: Trainer, init: Path) -> int:
    """Writes the values of a trainer's codes over the weights of a plain folder; returns the number of tensors."""
    [path] = init.glob("*.safetensors")
    [decoder] = trainer.stages
    values, count = load_file(path), 0
    for local in decoder.local_params():
        layer = decoder.get_submodule(local.name.rpartition(".")[0])
        if not isinstance(layer, LINEAR) or layer.codes is None or local.name.endswith(".bias"):
            continue
        wide = layer.codes[:]
        if layer.product.num_transposed:
            wide = torch.cat([block.t() for block in wide.chunk(layer.product.num_transposed)])
        for piece in local.pieces:
            part = wide.reshape(-1)[piece.start : piece.start + piece.box.size].view(piece.box.shape)
            assert not torch.equal(values[piece.tensor.name], part)
            values[piece.tensor.name] = part.contiguous()
            count += 1
    save_file(values, path, {"format": "pt"})
    return count


@pytest.mark.parametrize("base", ["int8", pytest.param("int4", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("model", [pytest.param("gpt2", marks=pytest.mark.matrix), "llama"])
def test_training_is_that_on_a_base_with_the_values_of_the_codes(configure: Configure, model: str, base: str) -> None:
    init, found = make_base(configure, model), list[float]()
    config = adapting(configure, init, "coded", base)
    trainer = make_trainer(config, on_step=lambda step, result: found.append(result.loss))
    trainer.fit()
    assert widen_stored(trainer, init) == {"llama": 14, "gpt2": 8}[model]
    expected = run_training(adapting(configure, init, "wide", "auto"))["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "sequence parallel" else pytest.mark.matrix) for name in LAYOUTS]
)
def test_every_layout_trains_alike(rank_pool: RankPool, configure: Configure, name: str) -> None:
    init = make_base(configure, "llama")
    expected = run_training(adapting(configure, init, "one", "int4"))["loss"]
    found = rank_pool.run(run_training, 2, config=adapting(configure, init, "split", "int4", **LAYOUTS[name]))
    np.testing.assert_allclose(found[-1]["loss"], expected, rtol=1e-5)


def test_the_codes_take_less_than_a_third_of_bf16(configure: Configure) -> None:
    model = {"hidden_size": 128, "intermediate_size": 256}
    trainer = make_trainer(configure(model=model, lora={"rank": 4, "base": "int4"}, precision={"params": "bf16"}))
    [decoder] = trainer.stages
    codes = [module.codes for module in decoder.modules() if isinstance(module, LINEAR) and module.codes]
    parts = [part for each in codes for part in (each.codes, each.scales, each.minima) if part is not None]
    held, size = sum(part.nbytes for part in parts), sum(each.shape.numel() for each in codes)
    assert size == 2 * (128 * 128 * 3 + 3 * 128 * 256)  # two layers with half as many kv heads
    assert held == coded_bytes(decoder.spec, decoder.local_params(), 1)
    assert held <= 0.33 * 2 * size
    params = dict(decoder.named_parameters())
    assert all(params[name].is_meta for name in coded_groupings(decoder.spec, 1)), "no weight is there, too"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"zero": {"stage": 3}}, r"zero.stage = 3 spreads it"),
        ({"model": {"architecture": "mixtral"}}, r"\[lora\] base = \"int4\": training keeps no experts in codes"),
    ],
)
def test_what_is_not_built_is_refused(configure: Configure, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(configure(lora={"base": "int4"}, **sections))
