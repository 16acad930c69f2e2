"""The state of training that a checkpoint stores beside tensors, to and from JSON; it does not depend on the layout."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...core.errors import CheckpointError
from .progress import TrainState


@dataclass(frozen=True, slots=True)
class LossScaleState:
    """A loss scale of fp16, and the number of steps without overflow since it last changed."""

    value: float
    good_steps: int


@dataclass(frozen=True, slots=True)
class RunResume:
    """The stored state of a step of `tk train`.

    Attributes:
        state: the progress of the run.
        optimizer_step: the number of updates; skipped steps do not count.
        loss_scale: the loss scale; None if parameters are not fp16.
        seed: the seed of the rows' order.
        data_fingerprint: a digest of everything that decides the order of tokens.
    """

    state: TrainState
    optimizer_step: int
    loss_scale: LossScaleState | None
    seed: int
    data_fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for a manifest."""
        return asdict(self.state) | {
            "optimizer_step": self.optimizer_step,
            "loss_scale": _loss_scale_json(self.loss_scale),
            "seed": self.seed,
            "data_fingerprint": self.data_fingerprint,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> "RunResume":
        """Reads the data that `to_json` returned.

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
    """The stored state of a step of `initialize`.

    Attributes:
        step: the step's number, as in the folder's name.
        optimizer_step: the number of updates, which is smaller only after skipped steps of `tk train`.
        loss_scale: the loss scale; None if parameters are not fp16.
    """

    step: int
    optimizer_step: int
    loss_scale: LossScaleState | None

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for a manifest."""
        updates = {} if self.optimizer_step == self.step else {"optimizer_step": self.optimizer_step}
        return {"step": self.step, **updates, "loss_scale": _loss_scale_json(self.loss_scale)}

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> "ModuleResume":
        """Reads the data of a step of `initialize` or of `tk train`; see `RunResume.from_json`."""
        step = _count(_resumable(data, where), "step", where)
        updates = _count(data, "optimizer_step", where) if "optimizer_step" in data else step
        return ModuleResume(step, updates, _loss_scale(data, where))


def _resumable(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if "step" not in data:
        raise CheckpointError(
            f"{where} holds weights only: there is nothing to resume. To train from its weights, name it in [model] "
            "init."
        )
    return data


def _count(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _unusable(where, key, value, "a whole number, 0 or more")
    return value


def _loss_scale(data: Mapping[str, Any], where: str) -> LossScaleState | None:
    """Returns the loss scale; None if the run was not in fp16. Steps of early versions have no such key."""
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
