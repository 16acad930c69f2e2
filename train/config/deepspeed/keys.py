"""The keys of a DeepSpeed JSON configuration: those that tk's configuration has, those that change no number, and those
that are refused, with what to do instead. Plain tables; `config.py` and `rules.py` read them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

# A value that becomes a value of ours as it is, given the type.
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

# What DeepSpeed does where a key is absent and tk would do otherwise: key of ours -> value, key of DeepSpeed's.
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

# Read by rules of their own.
RULED: Final = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    | {"bf16.enabled", "bfloat16.enabled", "fp16.enabled", "fp16.initial_scale_power", "fp16.hysteresis"}
    | {"optimizer.type", "optimizer.params.adam_w_mode", "optimizer.params.torch_adam"}
    | {"scheduler.type", "zero_optimization.mics_shard_size"}
    | {f"scheduler.params.{name}" for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")}
    | {f"scheduler.params.{name}" for name in ("total_num_steps", "warmup_min_ratio", "cos_min_ratio")}
    | {"scheduler.params.last_batch_iteration"}
)

# The only values that tk carries out, and what to do where another is wanted.
FIXED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = MappingProxyType(
    {
        "fp16.loss_scale": ((0,), "tk's loss scale is dynamic: leave it 0, and set initial_scale_power"),
        "fp16.fp16_master_weights_and_grads": ((False,), "tk's masters and gradients are fp32"),
        "bf16.bf16_master_weights_and_grads": ((False,), "tk's masters and gradients are fp32"),
        "bf16.bf16_optimizer_states": ((False,), "tk's optimizer states are fp32"),
        "optimizer.params.bias_correction": ((True,), "tk's AdamW always corrects its bias"),
        "optimizer.params.amsgrad": ((False,), "tk has no AMSGrad"),
        "optimizer.params.maximize": ((False,), "tk minimizes"),
        "scheduler.params.last_batch_iteration": ((-1,), "a resumed run knows its step"),
        "zero_optimization.cpu_offload": ((False,), "there is no offloading yet: raise zero_optimization.stage"),
        "zero_optimization.cpu_offload_params": ((False,), "there is no offloading yet: shard over more ranks"),
        "zero_optimization.zero_quantized_weights": ((False,), "tk gathers parameters as they are"),
        "zero_optimization.zero_quantized_nontrainable_weights": ((False,), "tk keeps parameters as they are"),
        "zero_optimization.zero_quantized_gradients": ((False,), "tk reduces gradients in fp32"),
        "zero_optimization.zeropp_loco_param": ((None,), "tk reduces gradients in fp32"),
        "tensor_parallel.autotp_size": ((0, 1), "set [parallel] tp"),
        "sequence_parallel_size": ((1,), "[parallel] sequence_parallel splits hidden states over tp"),
    }
)

# Whole sections that change what is computed, or where it is kept, and what to do instead. A section is off unless it
# says "enabled": true or names a device; the last ones have no such switch and are off where all their values are.
REFUSED_SECTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "zero_optimization.offload_optimizer": "there is no offloading yet: raise zero_optimization.stage, or dp",
        "zero_optimization.offload_param": "there is no offloading yet: stage 3 shards parameters over dp",
        "amp": "use bf16 or fp16",
        "torch_autocast": "use bf16 or fp16",
        "elasticity": 'set [parallel] dp = "auto" and start with torchrun --nnodes MIN:MAX --max-restarts N',
        "autotuning": "tk plan CONFIG.toml says what fits",
        "curriculum_learning": "tk has none; order is a function of [train] seed",
        "data_efficiency": "tk has none; order is a function of [train] seed",
        "progressive_layer_drop": "tk has none",
        "eigenvalue": "tk has none",
        "hybrid_engine": "tk serve serves the run's checkpoints",
        "sparse_attention": "sliding windows are a property of the model: [model] sliding_window",
        "compression_training": "tk has none",
        "quantize_training": "tk has none",
        "pipeline": "set [parallel] pp and schedule",
    }
)
WITHOUT_SWITCH: Final = frozenset({"sparse_attention", "compression_training", "quantize_training", "pipeline"})

# Keys and sections whose every value leaves the trained numbers as they are, and what tk does in their place.
NOTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "activation_checkpointing": "what backward computes again is [recompute] mode",
        "flops_profiler": "metrics.jsonl has mfu and tokens_per_second",
        "comms_logger": "tk plan CONFIG.toml lists what is sent",
        "wandb": "read metrics.jsonl, or set [metrics] tensorboard = true",
        "comet": "read metrics.jsonl, or set [metrics] tensorboard = true",
        "csv_monitor": "metrics.jsonl has a line per logged step",
        "nebula": "saves go on in the background anyway: [checkpoint] async_save",
        "checkpoint": "tk's checkpoints load at every layout",
        "aio": "there is no offloading to disks",
        "communication_data_type": "gradients are reduced in fp32",
        "seq_parallel_communication_data_type": "gradients are reduced in fp32",
        "data_types": "gradients are accumulated in fp32",
        "sparse_gradients": "gradients are dense",
        "prescale_gradients": "the loss is divided by the number of valid tokens beforehand",
        "gradient_predivide_factor": "the loss is divided by the number of valid tokens beforehand",
        "zero_optimization.zero_hpz_partition_size": "[zero] shard_size = N shards within N ranks",
    }
)

_ZERO: Final = frozenset(
    {"allgather_partitions", "allgather_bucket_size", "reduce_scatter", "contiguous_gradients", "sub_group_size"}
    | {"round_robin_gradients", "ignore_unused_parameters", "use_multi_rank_bucket_allreduce", "elastic_checkpoint"}
    | {"load_from_fp32_weights", "legacy_stage1", "memory_efficient_linear", "mics_hierarchical_params_gather"}
    | {"cpu_offload_use_pin_memory", "override_module_apply", "log_trace_cache_warnings"}
    | {"pipeline_loading_checkpoint"}
)
_STAGE_3: Final = frozenset(  # DeepSpeed takes them with and without "stage3_" before them
    {"prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"}
    | {"max_reuse_distance", "module_granularity_threshold", "use_all_reduce_for_fetch_params"}
    | {"gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save"}
)

# Tuning of what tk does by itself, or of DeepSpeed's own output: changes no result.
NEEDLESS: Final = frozenset(
    {f"zero_optimization.{name}" for name in _ZERO | _STAGE_3}
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
