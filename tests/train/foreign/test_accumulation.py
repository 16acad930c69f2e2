"""What `backward` accumulates is applied whole or discarded: after an error, by zero_grad, by load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tk.core.errors import ConfigError, TkError
from tk.tests.rank_pool import RankPool
from tk.train import initialize

STAGES = (0, 1, 2, 3)


def _engine(zero: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return initialize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), {"lr": 0.1}, zero=zero, **options)


def _fail(grad: torch.Tensor) -> None:
    raise ArithmeticError("out of something")


def _weights(engine: Any) -> list[float]:
    return [value for tensor in engine.state_dict().values() for value in tensor.flatten().tolist()]


def _fail_in_backward(engine: Any) -> None:
    """Backward of a loss whose last layer has its gradients when it fails."""

    def fail_behind(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(_fail)

    hidden = engine.module[0].register_forward_hook(fail_behind)
    loss = engine(torch.ones(2, 3)).sum()
    hidden.remove()
    with pytest.raises(ArithmeticError, match="out of something"):
        engine.backward(loss)


def fail_on_some_ranks(zero: int, ranks: list[int]) -> list[list[float]]:
    """A step that fails on `ranks`, where its gradients are discarded, then a step that does not."""
    engine = _engine(zero, accumulate=2, bucket_size=4)
    rank = engine._engine.mesh.world.rank
    before = _weights(engine)
    if rank in ranks:
        _fail_in_backward(engine)
        with pytest.raises(ConfigError, match=r"last engine.backward failed.*engine.zero_grad\(\)"):
            engine.step()
        engine.zero_grad()
    else:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3)).sum())
        with pytest.raises(TkError, match=f"Nothing was updated: {len(ranks)} of 2 ranks discarded"):
            engine.step()
    assert _weights(engine) == before
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)).mean())
    assert engine.step()
    return [before, _weights(engine)]


@pytest.mark.parametrize(("zero", "ranks"), [(0, [1]), (2, [0]), (1, [0, 1]), (3, [0, 1])])
def test_a_step_that_failed_on_some_ranks_is_discarded_on_all(rank_pool: RankPool, zero: int, ranks: list[int]) -> None:
    (before, after), other = rank_pool.run(fail_on_some_ranks, 2, zero=zero, ranks=ranks)
    assert other == [before, after]
    clean = _engine(0)
    clean.backward(clean(torch.ones(2, 3)).mean())
    clean.step()
    assert before != after
    assert after == pytest.approx(_weights(clean), rel=1e-6)


@pytest.mark.parametrize("zero", STAGES)
def test_half_a_gradient_is_never_applied(zero: int) -> None:
    engine = _engine(zero)
    _fail_in_backward(engine)
    for call in (engine.step, lambda: engine.backward(engine(torch.ones(2, 3)).sum())):
        with pytest.raises(ConfigError, match=r"engine.zero_grad\(\)"):
            call()
    engine.zero_grad()
    engine.backward(engine(torch.ones(2, 3)).mean())
    assert engine.step()
    clean = _engine(zero)
    clean.backward(clean(torch.ones(2, 3)).mean())
    clean.step()
    assert _weights(engine) == _weights(clean)


@pytest.mark.parametrize("zero", STAGES)
def test_a_load_in_the_middle_of_a_step_discards_its_gradients(tmp_path: Path, zero: int) -> None:
    engine, clean = (_engine(zero, accumulate=2) for _ in range(2))
    engine.save(tmp_path, wait=True)
    engine.backward(engine(torch.full((2, 3), 100.0)).mean())
    engine.load(tmp_path)
    for each in (engine, clean):
        for _ in range(2):
            each.backward(each(torch.ones(2, 3)).mean())
        assert each.step()
    assert _weights(engine) == _weights(clean)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("change", ["step", "load"])
def test_a_graph_from_before_a_change_is_refused(tmp_path: Path, zero: int, change: str) -> None:
    engine = _engine(zero)
    engine.save(tmp_path, wait=True)
    old = engine(torch.ones(2, 3)).mean()
    if change == "step":
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()
    else:
        engine.load(tmp_path)
    with pytest.raises((RuntimeError, TkError), match=r"modified by an inplace operation|from before the parameters"):
        engine.backward(old)


@pytest.mark.parametrize("zero", STAGES)
def test_a_loss_through_two_engines_names_both_ways_out(zero: int) -> None:
    first, second = _engine(zero), _engine(zero)
    loss = (
        second.module(first(torch.ones(2, 3)).expand(2, 3))
        if zero < 3
        else second(first(torch.ones(2, 3)).expand(2, 3))
    )
    with pytest.raises(ConfigError, match=r"backward of another engine.*detach.*freeze.*once for each engine"):
        first.backward(loss.mean())


@pytest.mark.parametrize("zero", [0, 3])
def test_an_error_of_dtypes_says_what_to_cast(zero: int) -> None:
    engine = _engine(zero, precision="bf16")
    with pytest.raises(RuntimeError, match=r"dtype") as caught:
        engine(torch.ones(2, 3))
    [note] = caught.value.__notes__
    assert "torch.float32, and the module's parameters are torch.bfloat16" in note
    assert "x.to(torch.bfloat16)" in note
    engine.backward(engine(torch.ones(2, 3).bfloat16()).mean())
    assert engine.step()


@pytest.mark.parametrize("loss", [None, 1.5, torch.ones(()), torch.ones(3, requires_grad=True) * 2])
def test_what_is_no_loss_changes_nothing(loss: Any) -> None:
    engine = _engine(0)
    with pytest.raises(ConfigError, match="takes the scalar loss of one micro-batch"):
        engine.backward(loss)
    engine.backward(engine(torch.ones(2, 3)).mean())
    assert engine.step()
