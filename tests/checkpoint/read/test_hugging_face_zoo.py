"""An export of any small model is loaded by `transformers` as its source was: no key missing, outputs equal."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import logging

from tk.checkpoint import Checkpoint, prepare_export, reshard
from tk.core.layout import Layout
from tk.model.registry import tensor_table
from tk.model.stored_config import stored_config
from tk.tests.checkpoint.zoo import MODELS, make, outputs
from tk.tests.model.architectures import ENTRIES

ALONE = [
    *("BertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification", "OPTForCausalLM"),
    *("GPTNeoXForCausalLM", "GemmaForCausalLM", "MambaForCausalLM", "llama3", "gpt2", "qwen3_moe"),
]


OURS = [name for name in ENTRIES if " " not in name]  # those with a second word are the same with another option


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def build(name: str, tied: bool | None = None) -> tuple[Any, str]:
    """The model, and the kind of its inputs; `tied` changes whether its head is."""
    if name in MODELS:
        return make(name, **{} if tied is None else {"tie_word_embeddings": tied}), MODELS[name][1]
    config = ENTRIES[name].make_config()
    config.tie_word_embeddings = config.tie_word_embeddings if tied is None else tied
    torch.manual_seed(0)
    return ENTRIES[name].model(config).eval(), "text"


def load(kind: type[Any], folder: Path) -> tuple[Any, dict[str, Any]]:
    """As `transformers` loads it, in fp32, and its complaints: keys missing, unexpected or of other shapes."""
    torch.manual_seed(7)  # for the missing tensors
    model, info = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    return model.eval(), {key: value for key, value in info.items() if value}


def resharded_and_exported(source: Path, name: str) -> Path:
    """By way of a tk checkpoint; with the table where there is one, as `tk reshard` does."""
    opened = Checkpoint.open(source)
    table = tensor_table(stored_config(opened)) if name in ENTRIES else None
    step = reshard(source, source.parent / "step", layout=Layout(), table=table)
    return prepare_export(Checkpoint.open(step), source.parent / "out").run()


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one, two)
        assert one.isfinite().all()


def some(names: Iterable[str]) -> list[Any]:
    """Names as cases, of which `make test` has each third."""
    return [pytest.param(name, marks=pytest.mark.matrix if index % 3 else ()) for index, name in enumerate(names)]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", some([*MODELS, *OURS]))
def test_an_export_is_the_model(tmp_path: Path, name: str) -> None:
    model, kind = build(name)
    model.save_pretrained(tmp_path / "plain")
    out = prepare_export(Checkpoint.open(tmp_path / "plain"), tmp_path / "plain_out", plain=True).run()
    found, info = load(type(model), out)
    assert info == {}
    assert_equal(outputs(found, kind), outputs(model, kind))

    tied = not getattr(model.config, "tie_word_embeddings", False)
    other, _ = build(name, tied)
    source = tmp_path / "other"
    other.to(torch.bfloat16).save_pretrained(source, max_shard_size="6kB")
    assert len(list(source.glob("*.safetensors"))) > 1
    wanted, info = load(type(model), source)
    assert info == {}
    found, info = load(type(model), resharded_and_exported(source, name))
    assert info == {}
    assert_equal(outputs(found, kind), outputs(wanted, kind))


@pytest.mark.parametrize("name", some(ALONE))
def test_a_base_model_alone_is_loaded_into_either_class(tmp_path: Path, name: str) -> None:
    model, kind = build(name)
    base = model.base_model
    base.save_pretrained(tmp_path / "base")
    out = prepare_export(Checkpoint.open(tmp_path / "base"), tmp_path / "out").run()
    for of in (type(base), type(model)):
        wanted, missing = load(of, tmp_path / "base")
        found, info = load(of, out)
        assert info == missing
        assert of is type(model) or set(info) <= {"missing_keys"}
        if of is type(model) or kind != "pair":
            assert_equal(outputs(found, kind), outputs(wanted, kind))
