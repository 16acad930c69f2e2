"""The states of a server, and the two answers of its health in each."""

import pytest
from grpc_health.v1 import health_pb2

from tk.core.errors import TkError, WorkerDied, WorkerStalled
from tk.infer.serve.errors import Draining, Loading
from tk.infer.serve.grpc.health import LIVENESS, READINESS, Health
from tk.infer.serve.operations.lifecycle import Lifecycle, ServerState
from tk.proto.v1 import generation_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
FOR_GOOD, FOR_NOW, STALLED = WorkerDied("gone"), WorkerDied("gone", 2.0), WorkerStalled("late")


@pytest.mark.parametrize(
    ("steps", "state", "is_ready", "refusal"),
    [
        ([], ServerState.LOADING, False, Loading),
        (["loaded"], ServerState.SERVING, True, None),
        (["loaded", FOR_NOW], ServerState.RECOVERING, False, None),
        (["loaded", FOR_NOW, None], ServerState.SERVING, True, None),
        (["loaded", STALLED], ServerState.STALLED, False, None),
        (["loaded", STALLED, None], ServerState.SERVING, True, None),
        (["loaded", STALLED, "draining"], ServerState.DRAINING, False, Draining),
        (["loaded", STALLED, FOR_NOW], ServerState.RECOVERING, False, None),
        (["loaded", STALLED, FOR_GOOD], ServerState.FAILED, False, None),
        (["loaded", "draining"], ServerState.DRAINING, False, Draining),
        (["draining"], ServerState.DRAINING, False, Draining),
        (["draining", "loaded"], ServerState.DRAINING, False, Draining),
        (["loaded", "draining", FOR_NOW, None], ServerState.DRAINING, False, Draining),
        (["loaded", FOR_GOOD], ServerState.FAILED, False, None),
        (["loaded", FOR_GOOD, "draining"], ServerState.FAILED, False, Draining),
    ],
)
def test_state_health_and_refusal(
    steps: list[str | WorkerDied | None], state: ServerState, is_ready: bool, refusal: type[TkError] | None
) -> None:
    health = Health()
    lifecycle = Lifecycle(health.show)
    for step in steps:
        match step:
            case "loaded":
                lifecycle.set_loaded()
            case "draining":
                lifecycle.set_draining()
            case _:
                assert not isinstance(step, str)
                lifecycle.set_death(step)
    assert lifecycle.state is state
    assert lifecycle.death is (FOR_GOOD if state is ServerState.FAILED else None)
    assert (health.status(READINESS) == SERVING) is is_ready
    assert (health.status(LIVENESS) == SERVING) is (state is not ServerState.FAILED)
    if refusal is None:
        lifecycle.check_admitting()
    else:
        with pytest.raises(refusal):
            lifecycle.check_admitting()


def test_the_states_are_those_of_the_wire() -> None:
    ours = {f"STATE_{state.name}" for state in ServerState}
    assert ours | {"STATE_UNSPECIFIED"} == set(pb.State.keys())
