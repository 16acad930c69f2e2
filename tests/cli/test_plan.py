"""`tk plan`: one document or tables for a configuration, with the least offload that fits, or for a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from tk.cli.plan import plan as plan_command
from tk.core.progress import format_bytes
from tk.model.config import ModelConfig
from tk.model.registry import count_parameters, decoder_spec
from tk.tests.train.conftest import Configure
from tk.tests.train.planning.small_models import MODELS, SHAPE


def test_the_command_prints_one_json_document(configure: Configure, write_toml: Any) -> None:
    path = write_toml(configure(parallel={"tp": 2}))
    shown = CliRunner().invoke(plan_command, [str(path), "--nproc", "4", "--json"])
    assert shown.exit_code == 0, shown.output
    document = json.loads(shown.stdout)
    assert document["model"]["vocab_size"] == 301, "that of the tokenizer"
    assert document["layout"]["dp"] == 2
    parts = dict(document["memory"][0])
    assert parts.pop("total_on_cpu") > parts["total"]
    assert parts.pop("total") == sum(parts.values())


def test_a_run_with_init_is_planned_with_the_shape_of_the_checkpoint(
    configure: Configure, write_toml: Any, tmp_path: Path
) -> None:
    folder = write_hugging_face(tmp_path / "hugging-face", ModelConfig(**MODELS["llama"]))
    config = configure(model={})
    config["model"] = {"init": str(folder)}
    shown = CliRunner().invoke(plan_command, [str(write_toml(config)), "--json"])
    assert shown.exit_code == 0, shown.output
    model = json.loads(shown.stdout)["model"]
    assert model["parameters"] == count_parameters(decoder_spec(ModelConfig(**MODELS["llama"])))
    assert model["vocab_size"] == SHAPE["vocab_size"]


def write_hugging_face(folder: Path, config: ModelConfig) -> Path:
    """Writes a checkpoint of zeros."""
    folder.mkdir()
    tensors = {spec.name: torch.zeros(spec.shape) for spec in decoder_spec(config).table if not spec.alias}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return folder


def test_a_checkpoint_is_planned_for_serving(configure: Configure, write_toml: Any, tmp_path: Path) -> None:
    folder, config = (
        write_hugging_face(tmp_path / "hugging-face", ModelConfig(**MODELS["llama"])),
        ModelConfig(**MODELS["llama"]),
    )
    shown = CliRunner().invoke(plan_command, [str(folder), "--json"])
    assert shown.exit_code == 0, shown.output
    rows = {row["tp"]: row for row in json.loads(shown.stdout)["serving"]}
    assert rows[1]["weight_bytes"] == 4 * count_parameters(decoder_spec(config))
    assert rows[1]["kv_bytes_per_token"]["fp32"] == 2 * rows[2]["kv_bytes_per_token"]["fp32"] == 2 * 3 * 2 * 16 * 4
    assert rows[4]["kv_bytes_per_token"] == rows[2]["kv_bytes_per_token"], "each of two kv heads is on two ranks"
    assert "num_attention_heads % tp = 4 % 8" in rows[8]["problem"]


def test_a_draft_is_planned_beside_its_model(tmp_path: Path) -> None:
    shape = MODELS["llama"]
    model = write_hugging_face(tmp_path / "model", ModelConfig(**shape))
    small = ModelConfig(**shape | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1})
    draft = write_hugging_face(tmp_path / "draft", small)
    words = [str(model), "--draft", str(draft)]
    found = json.loads(CliRunner().invoke(plan_command, [*words, "--json"]).stdout)["draft"]
    assert found["weight_bytes"] == 4 * count_parameters(decoder_spec(small))
    share = count_parameters(decoder_spec(small)) / count_parameters(decoder_spec(ModelConfig(**shape)))
    assert found["share"] == pytest.approx(share)
    assert found["kv_bytes_per_token"] == 1 * 1 * 2 * small.head_dim * 4
    shown = CliRunner().invoke(plan_command, [*words, "--draft-weight-dtype", "int8"]).stdout
    assert f"{draft}, a draft with weights in int8, in a process of its own: " in shown
    other = write_hugging_face(tmp_path / "other", ModelConfig(**shape | {"vocab_size": 17}))
    refused = CliRunner().invoke(plan_command, [str(model), "--draft", str(other)])
    assert "/other has a vocabulary of 17 tokens" in str(refused.exception)
    refused = CliRunner().invoke(plan_command, [str(model), "--draft-weight-dtype", "int8"])
    assert (refused.exit_code, "name it with --draft" in refused.output) == (2, True)


def test_the_command_finds_the_least_offload_and_shows_what_it_moves(configure: Configure, write_toml: Any) -> None:
    path = write_toml(configure(parallel={"dp": 2}, zero={"stage": 2}, precision={"params": "bf16"}))
    words = [str(path), "--device", "cuda", "--host-memory", "1TiB"]
    shown = CliRunner().invoke(plan_command, [*words, "--fit", "24GiB", "--json"])
    document = json.loads(shown.stdout)
    assert (shown.exit_code, document["fits"], document["moved"]) == (0, True, [])
    total = document["memory"][0]["total"] - document["memory"][0]["activations"]
    rates = ["--disk-rate", "2000:1000", "--link-rate", "20000"]
    shown = CliRunner().invoke(plan_command, [*words, *rates, "--fit", str(total - 1)])
    assert shown.exit_code == 0, shown.output
    for part in ("memory of the host", "GPU to host", "time, 2 ranks", '[offload] optimizer = "cpu" is the least that'):
        assert part in shown.stdout
    shown = CliRunner().invoke(plan_command, [*words, "--fit", "1KiB"])
    assert shown.exit_code == 1
    assert "Nothing fits into 1 KiB of a GPU" in shown.stdout


def test_activations_on_the_host_have_lines_of_their_own(configure: Configure, write_toml: Any) -> None:
    shown = CliRunner().invoke(plan_command, [str(write_toml(configure(offload={"activations": "cpu"})))])
    lines = {line[:24].strip(): line[24:].split() for line in shown.stdout.splitlines()}
    assert lines["offloaded activations"] != lines["activations"]
    assert "moved per rank and step" in lines
    assert lines["activations"][:2] == lines["activations"][2:4], "as much comes back as goes down"


def test_states_on_disk_are_shown_per_rank_and_per_host(configure: Configure, write_toml: Any) -> None:
    path = write_toml(configure(parallel={"dp": 4}, zero={"stage": 1}, offload={"optimizer": "disk"}))
    shown = CliRunner().invoke(plan_command, [str(path), "--json"])
    [disk] = json.loads(shown.stdout)["disk"]
    shown = CliRunner().invoke(plan_command, [str(path), "--hosts", "2"])
    assert "a host of 2 ranks" in shown.stdout
    assert f"{format_bytes(2 * disk['total'])} of disk" in shown.stdout


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--disk-rate", "fast", "'fast' is no rate"),
        ("--disk-rate", "0:5", "'0:5' is no rate"),
        ("--link-rate", "5:6", "'5:6' is no rate"),
        ("--hosts", "0", "0"),
    ],
)
def test_a_rate_or_a_number_of_hosts_that_is_none_is_refused(
    configure: Configure, write_toml: Any, option: str, value: str, said: str
) -> None:
    shown = CliRunner().invoke(plan_command, [str(write_toml(configure())), option, value])
    assert shown.exit_code == 2
    assert said in shown.output
