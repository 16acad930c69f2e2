"""Adapters of small models, made by `peft` and as steps of ours, and the logits of both."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tk.checkpoint import Checkpoint, NewStep, RunFolder, commit, write_part
from tk.checkpoint.format.adapter_record import AdapterRecord, BaseRecord
from tk.checkpoint.format.peft_names import names_of
from tk.core.layout import Layout
from tk.core.ownership import owned
from tk.core.tensors import with_slots
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.lora.options import LoraOptions
from tk.model.lora.peft_config import to_peft
from tk.model.lora.table import with_adapters
from tk.model.registry import decoder_spec
from tk.model.stored_adapter import StoredAdapter
from tk.model.stored_config import stored_config
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE
from tk.tests.checkpoint.saving import cut
from tk.tests.model.architectures import ENTRIES, VOCAB
from tk.train.engine.attention import causal_attention

CPU = torch.device("cpu")


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


def make_with_peft(name: str, home: Path, biases: bool = False, **options: Any) -> tuple[Path, Path, torch.Tensor]:
    """Saves a base and an adapter whose B is not zero, all with `peft`.

    Args:
        name: the entry of ENTRIES.
        home: the folder for both.
        biases: whether to change all that is trained beside the factors.

    Returns:
        The base's folder, the adapter's, and the logits of the two together.
    """
    model = ENTRIES[name].make(home / "base")
    torch.manual_seed(1)
    config = {"r": 4, "lora_alpha": 6, "fan_in_fan_out": name.startswith("gpt2")}
    peft = get_peft_model(model, LoraConfig(**config | options, init_lora_weights=False, task_type="CAUSAL_LM")).eval()
    peft.peft_config["default"].base_model_name_or_path = str(home / "base")
    with torch.no_grad():
        for key, parameter in peft.named_parameters():
            if biases and parameter.requires_grad and "lora_" not in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
        logits: torch.Tensor = peft(input_ids=tokens()).logits
    peft.save_pretrained(home / "adapter")
    return home / "base", home / "adapter", logits


def read_with_peft(base: Path, adapter: Path, merged: bool = False) -> Any:
    """Loads an adapter with `peft`; `merged`: into the base's weights."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    return model.merge_and_unload() if merged else model


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens()).logits
    return found


def our_logits(base: Path, adapter: Path) -> torch.Tensor:
    """Returns the logits that our decoder computes with an adapter that we read."""
    stored, model = StoredAdapter.of(Checkpoint.open(adapter)), Checkpoint.open(base)
    config = stored_config(model)
    decoder = Decoder(config, LayerContext(ALONE, torch.float32, CPU), spec=stored.decoder(config))
    with torch.no_grad():
        for local in decoder.local_params():
            flat = decoder.get_parameter(local.name).data.view(-1)
            for piece in local.pieces:
                source = stored.checkpoint if piece.tensor.stored else model
                values = source.read(piece.tensor.alias or piece.tensor.name).torch()
                flat[piece.start : piece.start + piece.box.size].copy_(values.reshape(-1))
        positions = torch.arange(tokens().shape[1]).expand_as(tokens())
        return decoder.logits(decoder(tokens(), positions, causal_attention))[..., :VOCAB]


def save_as_step(run: Path, base: Path, options: LoraOptions, layout: Layout, **more: Any) -> Path:
    """Saves a step of ours as every rank in turn, with random values.

    Args:
        run: the run folder.
        base: the folder of the base, whose config.json the step gets, too.
        options: the adapter's options.
        layout: the ranks.
        more: `identity` of the base, the numbers of its weights that it was `trained_in`, `weight`, the dtype code of
            the adapter's values (F32 or BF16), and `side_files`.
    """
    config = ModelConfig.from_folder(base)
    spec = with_adapters(decoder_spec(config), options)
    code = more.get("weight", "F32")
    table = with_slots(spec.table, {"weight": code})
    record = AdapterRecord(
        to_peft(options), BaseRecord(more.get("identity", ""), str(base), more.get("trained_in", "fp32"))
    )
    generator = torch.Generator().manual_seed(3)
    values = {each.name: 0.2 * torch.randn(each.shape, generator=generator) for each in table if each.stored}
    arrays = {
        name: value.numpy() if code == "F32" else value.bfloat16().view(torch.uint16).numpy()
        for name, value in values.items()
    }
    files = {"config.json": (base / "config.json").read_bytes()} | more.get("side_files", {})
    with RunFolder(run).lock() as locked:
        folder = locked.begin_step(1)
        for rank in range(layout.world_size):
            items = owned(table, layout, rank)
            write_part(folder, rank, table, [(item, code, cut(arrays[item.tensor], item)) for item in items])
        return commit(locked, NewStep(1, table, layout, side_files=files, adapter=record))


def with_config(folder: Path, **changes: Any) -> Path:
    """Changes keys of a folder's adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def tensors_of(folder: Path) -> Mapping[str, torch.Tensor]:
    """Returns the tensors of a folder of peft by their names in the model, read without our code."""
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: tensors[key] for key, name in names_of(tensors, "").items()}


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], most: float) -> Sequence[str]:
    """Returns the names of tensors that one of two models lacks, or with elements that differ by more than `most`."""
    lacking = [*(found.keys() ^ wanted.keys())]
    shared = found.keys() & wanted.keys()
    return lacking + [name for name in shared if (found[name] - wanted[name]).abs().max() > most]
