"""Plain state of training: the outcome of a step, where a run stands, and the part of it that a checkpoint stores."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one optimizer step, the same on every rank.

    Attributes:
        num_tokens: that the loss counts, of the global batch.
        stop: some rank was asked to stop.
        balance_loss: the routers' load-balancing loss, a mean over sequences, which `loss` leaves out.
        loss_scale: that the step was computed with.
        updated: whether parameters were; not where loss or gradient were not finite.
    """

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    stop: bool
    balance_loss: float = 0.0
    loss_scale: float = 1.0
    updated: bool = True


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands: steps taken, tokens learned and rows read so far."""

    step: int = 0
    tokens: int = 0
    samples: int = 0

    def advance(self, num_tokens: int, num_samples: int) -> "TrainState":
        """The state after one more step."""
        return TrainState(self.step + 1, self.tokens + num_tokens, self.samples + num_samples)


@dataclass(frozen=True, slots=True)
class LossScaleState:
    """A loss scale of fp16, and the steps without overflow since it last changed."""

    value: float
    good_steps: int


@dataclass(frozen=True, slots=True)
class RunResume:
    """A step of `tk train`, free of any layout: what its checkpoint stores beside tensors.

    Attributes:
        optimizer_step: updates made; skipped steps are not among them.
        loss_scale: None where parameters are not fp16.
        data_fingerprint: of everything that decides which tokens come when.
    """

    state: TrainState
    optimizer_step: int
    loss_scale: LossScaleState | None
    seed: int
    data_fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        return asdict(self.state) | {
            "optimizer_step": self.optimizer_step,
            "loss_scale": _loss_scale_json(self.loss_scale),
            "seed": self.seed,
            "data_fingerprint": self.data_fingerprint,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> "RunResume":
        """Reads what `to_json` made.

        Args:
            where: the checkpoint's path, for errors.

        Raises:
            CheckpointError: there is nothing to resume, or a value is missing or of a wrong kind.
        """
        fingerprint = _resumable(data, where).get("data_fingerprint")
        if not isinstance(fingerprint, str):
            raise CheckpointError(
                f"{where} does not name the data that it was trained on, as a step of `tk train` does: a step that "
                "`initialize` saved is resumed by its engine.load. To train from its weights, name it in [model] init."
            )
        return RunResume(
            TrainState(*(_count(data, key, where) for key in ("step", "tokens", "samples"))),
            _count(data, "optimizer_step", where),
            _loss_scale(data, where),
            _count(data, "seed", where),
            fingerprint,
        )


@dataclass(frozen=True, slots=True)
class ModuleResume:
    """A step of `initialize`, free of any layout: what its checkpoint stores beside tensors."""

    step: int
    loss_scale: LossScaleState | None

    def to_json(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        return {"step": self.step, "loss_scale": _loss_scale_json(self.loss_scale)}

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> "ModuleResume":
        """As `RunResume.from_json`; reads a step of `tk train`, too."""
        return ModuleResume(_count(_resumable(data, where), "step", where), _loss_scale(data, where))


def _resumable(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if "step" not in data:
        raise CheckpointError(f"{where} holds weights only: there is nothing to resume.")
    return data


def _count(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _unusable(where, key, value, "a whole number, 0 or more")
    return value


def _loss_scale(data: Mapping[str, Any], where: str) -> LossScaleState | None:
    """None where the run was not in fp16; steps of early versions have no such key."""
    stored = data.get("loss_scale", {})
    if not isinstance(stored, Mapping):
        raise _unusable(where, "loss_scale", stored, "an object")
    if not stored:
        return None
    value = stored.get("value")
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise _unusable(where, "loss_scale.value", value, "a number above 0")
    return LossScaleState(float(value), _count(stored, "good_steps", where))


def _loss_scale_json(scale: LossScaleState | None) -> dict[str, Any]:
    return asdict(scale) if scale else {}


def _unusable(where: str, key: str, value: object, right: str) -> CheckpointError:
    return CheckpointError(f"{where}: {key} of the state to resume is {value!r}; it must be {right}.")
