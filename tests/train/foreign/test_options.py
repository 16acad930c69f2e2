"""Arguments of `initialize`: a wrong one is answered with the right values, before anything is touched."""

from typing import Any

import pytest
import torch
from torch import nn

from tk.core.errors import ConfigError
from tk.train import initialize


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"zero": 4}, "'zero' = 4: input should be 0, 1, 2 or 3"),
        ({"precision": "int8"}, "'precision' = 'int8': input should be 'fp32', 'bf16' or 'fp16'"),
        ({"precision": torch.bfloat16}, "'precision' = torch.bfloat16: input should be 'fp32', 'bf16'"),
        ({"accumulate": 0}, "'accumulate' = 0.*greater than or equal to 1"),
        ({"accumulate": 2.5}, "'accumulate' = 2.5"),
        ({"steps": "many"}, "'steps' = 'many'"),
        ({"shard_size": -1}, "'shard_size' = -1"),
        ({"bucket_size": 0}, "'bucket_size' = 0"),
        ({"overlap": "no"}, "'overlap' = 'no'"),
        ({"timeout_seconds": 0.0}, "'timeout_seconds' = 0.0"),
        ({"optimizer": "adamw"}, "optimizer is of type str; it takes a mapping with some of the keys name, lr"),
        ({"optimizer": 1e-3}, "optimizer is of type float"),
        ({"optimizer": {"name": "sgd"}}, "'name' = 'sgd': input should be 'adamw'"),
        ({"optimizer": {"lr": "3e-4"}}, "'lr' = '3e-4'"),
        ({"optimizer": {"weight_decya": 0.1}}, "did you mean 'weight_decay'"),
        ({"optimizer": {"schedule": "cosine"}}, "steps=N"),
        ({"optimizer": torch.optim.SGD}, "torch's SGD.*takes its keys instead"),
        ({"optimizer": torch.optim.Adam([torch.ones(1, requires_grad=True)])}, "torch's Adam.*takes its keys"),
        (
            {"optimizer": torch.optim.AdamW([torch.ones(1, requires_grad=True)], lr=2e-3)},
            r"torch's AdamW.*Write initialize\(model, {'lr': 0.002, 'betas': \(0.9, 0.999\), 'eps': 1e-08, 'weight_dec",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    module = nn.Linear(2, 2)
    before = module.weight
    with pytest.raises(ConfigError, match=message):
        initialize(module, **arguments)
    assert module.weight is before
    assert module.weight.dtype == torch.float32
