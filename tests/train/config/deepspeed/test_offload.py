"""DeepSpeed's offload sections: devices and folders are mapped, what tk cannot carry out is refused by its name."""

import re
from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.train.config.deepspeed.config import Mapped, map_deepspeed
from tk.train.config.deepspeed.keys import FIXED, NEEDLESS, NOTED, REFUSED_SECTIONS, RULED

# The keys of DeepSpeedZeroConfig, DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig, get_aio_config
# and docs/_pages/config-json.md at commit edaa722 of deepspeedai/DeepSpeed.
SECTIONS = {
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory pipeline_read pipeline_write "
    "fast_init ratio super_offload cpuadam_cores_perc",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization": "cpu_offload cpu_offload_param cpu_offload_use_pin_memory sub_group_size zenflow leaf_module "
    "stage3_allgather_sequential enable_sanity_checks save_muon_momentum_buffer_in_memory round_robin_gradients",
    "activation_checkpointing": "partition_activations number_checkpoints contiguous_memory_optimization "
    "synchronize_checkpoint_boundary profile cpu_checkpointing",
    "aio": "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
}


def mapped(zero: dict[str, Any], **other: Any) -> Mapped:
    return map_deepspeed({"zero_optimization": zero, **other}, "ds.json", 2, 1)


def settings(zero: dict[str, Any], *, absent: bool = False) -> dict[str, Any]:
    found = [each for each in mapped(zero).settings if each.key.startswith("offload.") and each.absent == absent]
    return {each.key.removeprefix("offload."): each.value for each in found}


def test_every_key_of_offload_and_aio_is_known() -> None:
    known = {*RULED, *FIXED, *NEEDLESS, *NOTED, *REFUSED_SECTIONS}
    unknown = [f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys.split()]
    assert [key for key in unknown if key not in known] == []


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({}, {}),
        ({"offload_optimizer": None, "offload_param": None, "cpu_offload": False}, {}),
        ({"offload_optimizer": {"pin_memory": True}}, {}),  # DeepSpeed's default of `device` is "none"
        ({"offload_optimizer": {"device": "none", "nvme_path": "none"}}, {"optimizer": "none"}),
        ({"offload_optimizer": {"device": "cpu", "nvme_path": "/nvme"}}, {"optimizer": "cpu"}),
        ({"offload_optimizer": {"device": "nvme"}}, {"optimizer": "disk"}),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}, {"optimizer": "disk", "folder": "/nvme"}),
        ({"offload_optimizer": {"device": "auto", "nvme_path": "auto"}}, {}),
        ({"cpu_offload": True}, {"optimizer": "cpu"}),
        ({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, {"optimizer": "cpu"}),
        ({"stage": 3, "cpu_offload_params": True}, {"parameters": "cpu"}),
        ({"stage": 3, "cpu_offload_param": True}, {"parameters": "cpu"}),
        (
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            {"optimizer": "cpu", "parameters": "disk", "folder": "/nvme"},  # at the stage of the TOML file
        ),
        (
            {"stage": 3}
            | {name: {"device": "nvme", "nvme_path": "/nvme"} for name in ("offload_optimizer", "offload_param")},
            {"optimizer": "disk", "parameters": "disk", "folder": "/nvme"},
        ),
    ],
)
def test_devices_are_mapped(zero: dict[str, Any], expected: dict[str, Any]) -> None:
    assert settings(zero) == expected


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"cpu_checkpointing": True, "partition_activations": True}, ["cpu"]),
        ({"cpu_checkpointing": False}, ["none"]),
        ({"cpu_checkpointing": "auto", "profile": True}, []),
        (None, []),
    ],
)
def test_checkpoints_on_the_cpu_are_activations_there(section: Any, expected: list[str]) -> None:
    found = mapped({}, activation_checkpointing=section)
    assert [each.value for each in found.settings if each.key == "offload.activations"] == expected
    noted = {note.split(" has no effect: [recompute] mode")[0] for note in found.notes if "[recompute] mode" in note}
    assert noted == {f"activation_checkpointing.{key}" for key in section or () if key != "cpu_checkpointing"}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"cpu_checkpointing": 1}, "activation_checkpointing.cpu_checkpointing = 1 must be true or false"),
        ({"cpu_checkpoint": True}, "did you mean 'activation_checkpointing.cpu_checkpointing'"),
        (True, "activation_checkpointing = True is not supported, only None: it must be an object"),
    ],
)
def test_other_values_and_keys_of_checkpointing_are_refused(section: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        mapped({}, activation_checkpointing=section)


@pytest.mark.parametrize(("device", "tier"), [("cpu", "cpu"), ("nvme", "disk")])
def test_gradients_go_where_the_states_are_unless_the_toml_says_otherwise(device: str, tier: str) -> None:
    assert settings({"offload_optimizer": {"device": device}}, absent=True) == {"gradients": tier}
    assert settings({"offload_optimizer": {"device": "none"}}, absent=True) == {}


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"offload_optimizer": {"device": "gpu"}}, r"offload_optimizer.device = 'gpu' must be one of 'none', 'cpu'"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, r"offload_optimizer.ratio = 0.5 is not supported"),
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "super_offload = True is not supported"),
        ({"offload_optimizer": "cpu"}, "offload_optimizer = 'cpu' is not supported, .*it must be an object"),
        ({"offload_optimizer": {"devise": "cpu"}}, r"unknown key '\S+devise'; did you mean '\S+device'\?$"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": 3}}, "nvme_path = 3 must be the path of a folder"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, r"offload_param.device needs zero_optimization.stage = 3"),
        (
            {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}},
            r"offload_optimizer.device and zero_optimization.cpu_offload name different devices",
        ),
        (
            {
                "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                "offload_param": {"device": "nvme", "nvme_path": "/b"},
            },
            "nvme_path = '/a' and zero_optimization.offload_param.nvme_path = '/b' differ; tk has one folder",
        ),
        ({"zenflow": {"topk_ratio": 0.1}}, "zenflow is not supported: tk updates every parameter in every step"),
    ],
)
def test_what_tk_cannot_carry_out_is_refused_by_name(zero: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        mapped(zero)


def test_a_part_that_is_off_may_have_any_ratio() -> None:
    assert settings({"offload_optimizer": {"ratio": 0.3, "super_offload": True}}) == {}


def test_aio_changes_no_number_and_is_noted() -> None:
    notes = mapped({}, aio={"block_size": 2**20, "thread_count": 2}).notes
    assert notes == ("tk does not need: aio.block_size, aio.thread_count",)
    with pytest.raises(ConfigError, match=r"aio.use_gds = True is not supported, only False: tk updates states on the"):
        mapped({}, aio={"use_gds": True})
