"""Ranks with pretended GPUs: torch.distributed as it is over NCCL, with messages that go over gloo."""

from typing import Any

import pytest
import torch
import torch.distributed as dist


class PretendedRanks:
    """The process groups of one rank. Those that were asked for with gloo send tensors of the host; all others none.

    Args:
        over_gloo: whether the job was started over gloo, as ranks that share one GPU are.
    """

    def __init__(self, over_gloo: bool = False) -> None:
        self._over_gloo = over_gloo
        self._of_hosts: set[str] = set()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Makes torch answer as if its groups were NCCL's."""
        new_group = dist.new_group

        def noted(*arguments: Any, **keywords: Any) -> Any:
            made = new_group(*arguments, **keywords)
            if keywords.get("backend") == "gloo" and isinstance(made, dist.ProcessGroup):
                self._of_hosts.add(made.group_name)
            return made

        patch.setattr(dist, "new_group", noted)
        patch.setattr(dist, "get_backend", lambda group=None: "gloo" if self._is_of_hosts(group) else "nccl")
        patch.setattr(dist, "batch_isend_irecv", _post)
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 0))  # for the log of torch.distributed
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))

    def _is_of_hosts(self, group: dist.ProcessGroup | None) -> bool:
        return self._over_gloo or (group is not None and group.group_name in self._of_hosts)

    def check(self, operation: Any, arguments: Any, on_gpu: list[bool]) -> None:
        """Raises AssertionError if a collective has tensors of the host that NCCL would refuse, or mixes devices."""
        boxed = (each for each in arguments if isinstance(each, torch.ScriptObject))
        group = next(dist.ProcessGroup.unbox(each) for each in boxed if "ProcessGroup" in str(each._type()))
        asked = not self._is_of_hosts(group)
        assert all(each == asked for each in on_gpu), (
            f"{operation} over a group of {'NCCL' if asked else 'gloo'} has tensors of the {'host' if asked else 'GPU'}"
        )


def _post(operations: list[dist.P2POp]) -> list[Any]:
    return [each.op(each.tensor, each.peer, each.group, each.tag) for each in operations]
