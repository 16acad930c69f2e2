"""The keys of a DeepSpeed JSON configuration, in plain tables that `config.py` and `rules.py` read.

There are keys that map to a key of tk, keys that change no number, and keys that are refused with an alternative.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

# Keys whose value is that of a key of tk: key of DeepSpeed -> key of tk, type.
DIRECT: Final[Mapping[str, tuple[str, type]]] = MappingProxyType(
    {
        "zero_optimization.stage": ("zero.stage", int),
        "zero_optimization.reduce_bucket_size": ("zero.bucket_size", int),
        "zero_optimization.overlap_comm": ("zero.overlap", bool),
        "gradient_clipping": ("optimizer.grad_clip", float),
        "fp16.loss_scale_window": ("precision.loss_scale_window", int),
        "fp16.min_loss_scale": ("precision.min_loss_scale", float),
        "optimizer.params.lr": ("optimizer.lr", float),
        "optimizer.params.betas": ("optimizer.betas", list),
        "optimizer.params.eps": ("optimizer.eps", float),
        "optimizer.params.weight_decay": ("optimizer.weight_decay", float),
        "tensorboard.enabled": ("metrics.tensorboard", bool),
        "compile.enabled": ("train.compile", bool),
        "seed": ("train.seed", int),
    }
)

# DeepSpeed's defaults that differ from those of tk: key of tk -> value, key of DeepSpeed.
DEFAULTS: Final[Mapping[str, tuple[Any, str]]] = MappingProxyType(
    {
        "optimizer.lr": (1e-3, "optimizer.params.lr"),
        "optimizer.betas": ([0.9, 0.999], "optimizer.params.betas"),
        "optimizer.eps": (1e-8, "optimizer.params.eps"),
        "optimizer.weight_decay": (0.0, "optimizer.params.weight_decay"),
        "optimizer.schedule": ("constant", "scheduler.type"),
        "optimizer.grad_clip": (0.0, "gradient_clipping"),
    }
)

# Keys that functions of rules.py read.
RULED: Final = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    | {"bf16.enabled", "bfloat16.enabled", "fp16.enabled", "fp16.initial_scale_power", "fp16.hysteresis"}
    | {"optimizer.type", "optimizer.params.adam_w_mode", "optimizer.params.torch_adam"}
    | {"scheduler.type", "zero_optimization.mics_shard_size"}
    | {f"scheduler.params.{name}" for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")}
    | {f"scheduler.params.{name}" for name in ("total_num_steps", "warmup_min_ratio", "cos_min_ratio")}
    | {"scheduler.params.last_batch_iteration"}
    | {f"zero_optimization.{name}" for name in ("cpu_offload", "cpu_offload_param", "cpu_offload_params")}
    | {
        f"zero_optimization.{section}.{name}"
        for section in ("offload_optimizer", "offload_param")
        for name in ("device", "nvme_path")
    }
    | {f"zero_optimization.offload_optimizer.{name}" for name in ("ratio", "super_offload")}
    | {"activation_checkpointing.cpu_checkpointing"}
)

# Keys with values that tk carries out, and advice for those who need another value.
FIXED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = MappingProxyType(
    {
        "fp16.loss_scale": ((0,), "tk's loss scale is dynamic: leave it 0, and set initial_scale_power"),
        "fp16.fp16_master_weights_and_grads": ((False,), "tk's masters and gradients are fp32"),
        "bf16.bf16_master_weights_and_grads": ((False,), "tk's masters and gradients are fp32"),
        "bf16.bf16_optimizer_states": (
            (False,),
            '[optimizer] states = "bf16" keeps moments in bf16, and masters in fp32',
        ),
        "optimizer.params.bias_correction": ((True,), "tk's AdamW always corrects the bias of its moments"),
        "optimizer.params.amsgrad": ((False,), "tk has no AMSGrad"),
        "optimizer.params.maximize": ((False,), "tk minimizes"),
        "scheduler.params.last_batch_iteration": ((-1,), "a resumed run knows its step"),
        "zero_optimization.offload_optimizer": ((None, False), 'it must be an object, such as {"device": "cpu"}'),
        "zero_optimization.offload_param": ((None, False), 'it must be an object, such as {"device": "cpu"}'),
        "activation_checkpointing": ((None, False), "it must be an object; [recompute] mode does its work"),
        "aio": ((None, False), "it must be an object; tk does not need it"),
        "aio.use_gds": ((False,), "tk updates states on the host, so files are read to its memory and not to a GPU's"),
        "zero_optimization.zero_quantized_weights": ((False,), "tk gathers parameters in their own dtype"),
        "zero_optimization.zero_quantized_nontrainable_weights": ((False,), "tk does not quantize parameters"),
        "zero_optimization.zero_quantized_gradients": ((False,), "tk reduces gradients in fp32"),
        "zero_optimization.zeropp_loco_param": ((None,), "tk reduces gradients in fp32"),
        "tensor_parallel.autotp_size": ((0, 1), "set [parallel] tp"),
        "sequence_parallel_size": ((1,), "[parallel] sequence_parallel splits hidden states over tp"),
    }
)

# Sections that tk does not have, with an alternative. A section is off unless it has "enabled": true or names a device.
# The sections of WITHOUT_SWITCH have neither; they are off if all their values are.
REFUSED_SECTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "zero_optimization.zenflow": "tk updates every parameter in every step; [offload] updates beside the next step",
        "amp": "use bf16 or fp16",
        "torch_autocast": "use bf16 or fp16",
        "elasticity": 'set [parallel] dp = "auto" and start with torchrun --nnodes MIN:MAX --max-restarts N',
        "autotuning": "tk plan CONFIG.toml shows the memory that a layout needs",
        "curriculum_learning": "tk has none; the order of samples is a function of [train] seed",
        "data_efficiency": "tk has none; the order of samples is a function of [train] seed",
        "progressive_layer_drop": "tk has none",
        "eigenvalue": "tk has none",
        "hybrid_engine": "tk serve serves the run's checkpoints",
        "sparse_attention": "sliding windows are a property of the model: [model] sliding_window",
        "compression_training": "tk has none",
        "quantize_training": "tk has none",
        "pipeline": "set [parallel] pp and schedule",
    }
)
WITHOUT_SWITCH: Final = frozenset(
    {"sparse_attention", "compression_training", "quantize_training", "pipeline", "zero_optimization.zenflow"}
)

_CHECKPOINTING: Final = (
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.number_checkpoints",
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.synchronize_checkpoint_boundary",
    "activation_checkpointing.profile",
)

# Keys and sections that do not change the trained numbers, with the part of tk that does their work.
NOTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "flops_profiler": "metrics.jsonl has mfu and tokens_per_second",
        "comms_logger": "tk plan CONFIG.toml lists the bytes that ranks send",
        "wandb": "read metrics.jsonl, or set [metrics] tensorboard = true",
        "comet": "read metrics.jsonl, or set [metrics] tensorboard = true",
        "csv_monitor": "metrics.jsonl has a line per logged step",
        "nebula": "[checkpoint] async_save writes steps in the background",
        "checkpoint": "tk's checkpoints load at every layout",
        "communication_data_type": "gradients are reduced in fp32",
        "seq_parallel_communication_data_type": "gradients are reduced in fp32",
        "data_types": "gradients are accumulated in fp32",
        "sparse_gradients": "gradients are dense",
        "prescale_gradients": "tk divides the loss by the number of valid tokens before backward",
        "gradient_predivide_factor": "tk divides the loss by the number of valid tokens before backward",
        "zero_optimization.zero_hpz_partition_size": "[zero] shard_size = N shards within N ranks",
        "zero_optimization.leaf_module": "[zero] stage 3 gathers whole layers",
        **dict.fromkeys(_CHECKPOINTING, "[recompute] mode selects the activations that are recomputed"),
    }
)

_ZERO: Final = frozenset(
    {"allgather_partitions", "allgather_bucket_size", "reduce_scatter", "contiguous_gradients", "sub_group_size"}
    | {"round_robin_gradients", "ignore_unused_parameters", "use_multi_rank_bucket_allreduce", "elastic_checkpoint"}
    | {"load_from_fp32_weights", "legacy_stage1", "memory_efficient_linear", "mics_hierarchical_params_gather"}
    | {"cpu_offload_use_pin_memory", "override_module_apply", "log_trace_cache_warnings"}
    | {"pipeline_loading_checkpoint", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory"}
)
_STAGE_3: Final = frozenset(  # DeepSpeed accepts them with and without the prefix "stage3_"
    {"prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"}
    | {"max_reuse_distance", "module_granularity_threshold", "use_all_reduce_for_fetch_params"}
    | {"gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save", "allgather_sequential"}
)
_OFFLOAD: Final = frozenset(
    {f"offload_optimizer.{name}" for name in ("buffer_count", "pin_memory", "pipeline_read", "pipeline_write")}
    | {f"offload_optimizer.{name}" for name in ("fast_init", "cpuadam_cores_perc")}
    | {f"offload_param.{name}" for name in ("buffer_count", "buffer_size", "max_in_cpu", "pin_memory")}
)

# Keys that tune DeepSpeed's internals or its output; they change no result.
NEEDLESS: Final = frozenset(
    {f"zero_optimization.{name}" for name in _ZERO | _STAGE_3 | _OFFLOAD}
    | {f"aio.{name}" for name in ("block_size", "queue_depth", "thread_count", "intra_op_parallelism")}
    | {f"aio.{name}" for name in ("single_submit", "overlap_events")}
    | {f"zero_optimization.stage3_{name}" for name in _STAGE_3}
    | {f"bf16.{name}" for name in ("check_grad_overflow", "immediate_grad_update", "auto_cast", "loss_scale")}
    | {f"bf16.{name}" for name in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")}
    | {"steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "disable_allgather"}
    | {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "fp32_allreduce"}
    | {"tensorboard.output_path", "tensorboard.job_name", "compile.backend", "compile.kwargs"}
    | {"fp16.auto_cast", "fp16.consecutive_hysteresis", "optimizer.legacy_fusion"}
    | {f"optimizer.params.{name}" for name in ("fused", "foreach", "set_grad_none")}
    | {"use_data_before_expert_parallel_", "load_universal_checkpoint", "use_node_local_storage"}
)
