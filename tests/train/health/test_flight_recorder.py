"""The flight recorder: errors that show lost ranks are no causes."""

import torch.distributed as dist

from tk.core.errors import WorkerDied
from tk.train.health.flight_recorder import is_peer_loss


def test_errors_that_show_lost_ranks_are_distinguished_from_causes() -> None:
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    wrapped = WorkerDied("rank 2 is gone")
    wrapped.__cause__ = lost
    assert is_peer_loss(lost)
    assert is_peer_loss(wrapped)
    assert is_peer_loss(dist.DistBackendError("NCCL timeout"))
    assert not is_peer_loss(WorkerDied("the process that writes checkpoints was killed by signal 9"))
    assert not is_peer_loss(RuntimeError("shapes do not match"))
