"""The keys of a DeepSpeed JSON configuration: those that tk's configuration has, those that need nothing, and those
that are refused, with what to do instead. Plain tables; `deepspeed_config.py` reads them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# A value that becomes a value of ours as it is, given the type.
DIRECT: Final[Mapping[str, tuple[str, type]]] = MappingProxyType(
    {
        "zero_optimization.stage": ("zero.stage", int),
        "zero_optimization.reduce_bucket_size": ("zero.bucket_size", int),
        "zero_optimization.overlap_comm": ("zero.overlap", bool),
        "zero_optimization.mics_shard_size": ("zero.shard_size", int),
        "gradient_clipping": ("optimizer.grad_clip", float),
        "fp16.loss_scale_window": ("precision.loss_scale_window", int),
        "fp16.min_loss_scale": ("precision.min_loss_scale", float),
        "optimizer.params.lr": ("optimizer.lr", float),
        "optimizer.params.betas": ("optimizer.betas", list),
        "optimizer.params.eps": ("optimizer.eps", float),
        "optimizer.params.weight_decay": ("optimizer.weight_decay", float),
        "tensorboard.enabled": ("metrics.tensorboard", bool),
    }
)

# Read by rules of their own.
RULED: Final = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    | {"bf16.enabled", "bfloat16.enabled", "fp16.enabled", "fp16.initial_scale_power", "fp16.hysteresis"}
    | {"optimizer.type", "scheduler.type"}
    | {f"scheduler.params.{name}" for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")}
    | {f"scheduler.params.{name}" for name in ("total_num_steps", "warmup_min_ratio", "cos_min_ratio")}
)

# The only values that tk carries out, and what to do where another is wanted.
FIXED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = MappingProxyType(
    {
        "fp16.loss_scale": ((0,), "tk's loss scale is dynamic: leave it 0, and set initial_scale_power"),
        "optimizer.params.bias_correction": ((True,), "tk's AdamW always corrects its bias"),
        "optimizer.params.adam_w_mode": ((True,), "tk has AdamW only, with decoupled weight decay"),
        "optimizer.params.amsgrad": ((False,), "tk has no AMSGrad"),
        "zero_optimization.cpu_offload": ((False,), "there is no offloading yet: raise zero_optimization.stage"),
        "zero_optimization.cpu_offload_params": ((False,), "there is no offloading yet: shard over more ranks"),
        "zero_optimization.zero_hpz_partition_size": ((1,), "[zero] shard_size = N shards within N ranks"),
        "zero_optimization.zero_quantized_weights": ((False,), "tk gathers parameters as they are"),
        "zero_optimization.zero_quantized_gradients": ((False,), "tk reduces gradients in fp32"),
        "sparse_gradients": ((False,), "tk's gradients are dense"),
        "prescale_gradients": ((False,), "tk divides the loss by the number of valid tokens beforehand"),
        "gradient_predivide_factor": ((1, 1.0), "tk divides the loss by the number of valid tokens beforehand"),
        "communication_data_type": (("fp32",), "tk reduces gradients in fp32"),
        "data_types.grad_accum_dtype": (("fp32",), "tk accumulates gradients in fp32"),
        "sequence_parallel_size": ((1,), "[parallel] sequence_parallel splits hidden states over tp"),
    }
)

# Whole sections, wanted only where they are not switched off, and what to do instead.
REFUSED_SECTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "zero_optimization.offload_optimizer": "there is no offloading yet: raise zero_optimization.stage, or dp",
        "zero_optimization.offload_param": "there is no offloading yet: stage 3 shards parameters over dp",
        "amp": "use bf16 or fp16",
        "activation_checkpointing": 'set [recompute] mode = "selective" or "full"',
        "pipeline": "set [parallel] pp and schedule",
        "tensor_parallel": "set [parallel] tp",
        "elasticity": 'set [parallel] dp = "auto" and start with torchrun --nnodes MIN:MAX --max-restarts N',
        "autotuning": "tk plan CONFIG.toml says what fits",
        "flops_profiler": "metrics.jsonl has mfu and tokens_per_second",
        "comms_logger": "tk plan CONFIG.toml lists what is sent",
        "wandb": "read metrics.jsonl, or set [metrics] tensorboard = true",
        "csv_monitor": "metrics.jsonl has a line per logged step",
        "comet": "read metrics.jsonl, or set [metrics] tensorboard = true",
        "sparse_attention": "sliding windows are a property of the model: [model] sliding_window",
        "compression_training": "tk has none",
        "curriculum_learning": "tk has none; order is a function of [train] seed",
        "data_efficiency": "tk has none; order is a function of [train] seed",
        "progressive_layer_drop": "tk has none",
        "eigenvalue": "tk has none",
        "quantize_training": "tk has none",
        "hybrid_engine": "tk serve serves the run's checkpoints",
        "nebula": "saves go on in the background anyway: [checkpoint] async_save",
        "aio": "there is no offloading to disks",
        "checkpoint": "tk's checkpoints load at every layout",
    }
)

# Tuning of what tk does by itself, or of DeepSpeed's own output: changes no result.
NEEDLESS: Final = frozenset(
    {
        f"zero_optimization.{name}"
        for name in (
            "allgather_partitions",
            "allgather_bucket_size",
            "reduce_scatter",
            "contiguous_gradients",
            "round_robin_gradients",
            "sub_group_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "ignore_unused_parameters",
            "use_multi_rank_bucket_allreduce",
            "elastic_checkpoint",
            "load_from_fp32_weights",
            "legacy_stage1",
            "memory_efficient_linear",
            "mics_hierarchical_params_gather",
        )
    }
    | {"steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "disable_allgather"}
    | {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last"}
    | {"tensorboard.output_path", "tensorboard.job_name", "optimizer.params.torch_adam", "fp16.auto_cast"}
    | {"fp16.consecutive_hysteresis", "optimizer.legacy_fusion", "optimizer.params.fused"}
)
