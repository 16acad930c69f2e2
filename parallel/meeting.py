"""The meeting of all ranks before some of them make groups, and how the ranks of one host find each other.

Ranks of one host leave records under the host's identity in the store of torch's default process group. So a rank reads
as many records as its host has ranks, however many the world has.
"""

import hashlib
import os
import secrets
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES: Final = ("/proc/self/ns/pid", "/proc/self/ns/net")
_WORD_BITS: Final = 62  # random bits in one element of the agreement
_NUM_WORDS: Final = 4
_NAME_DIGITS: Final = 15  # hexadecimal digits of a group's name that are compared


def host_identity() -> bytes:
    """Returns 16 bytes that only the processes of one container on one host share.

    They are random, and so shared with no other process, if the system does not reveal its identity.
    """
    try:
        names = [_BOOT.read_text().strip(), *(str(os.stat(path).st_ino) for path in _NAMESPACES)]
    except OSError:
        return secrets.token_bytes(16)
    return hashlib.sha256(" ".join(names).encode()).digest()[:16]


class Meeting:
    """A meeting of all ranks of the default process group; every rank constructs it, and calls the same methods.

    After it, groups may be made by their members only. torch names such a group after its ranks and after a number that
    must be the same on all of them: of the groups that the rank is in, or in later versions (pytorch pull request
    189073) of those that it called for. Groups of a user can make it different; so ranks with fewer groups make some
    more in which they are alone.

    Attributes:
        rank: the number of this process in the default process group.
        secret: 16 bytes that only the ranks know, and that differ from meeting to meeting.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        words = [secrets.randbits(_WORD_BITS) if self.rank == 0 else 0 for _ in range(_NUM_WORDS)]
        for count in (_num_groups, _num_calls):
            number = int(dist.distributed_c10d._hash_ranks_to_str([])[:_NAME_DIGITS], 16)  # by the rank's number
            highest, lowest, most, *words = self._largest([number, -number, count(), *words])
            if highest == -lowest:
                break
            for _ in range(most - count()):
                dist.new_group([self.rank], backend="gloo", use_local_synchronization=True)
        drawn = " ".join(map(str, words))
        self.secret = hashlib.sha256(f"secret {drawn}".encode()).digest()[:16]
        world = dist.group.WORLD
        assert world is not None
        prefix = hashlib.sha256(f"name {drawn}".encode()).hexdigest()
        self._store = PrefixStore(f"tk/meeting/{prefix}", world.get_group_store())

    def _largest(self, numbers: list[int]) -> list[int]:
        """Returns the largest of all ranks' numbers at each place of a list."""
        agreed = torch.tensor(numbers, device=self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        largest: list[int] = agreed.tolist()
        return largest

    def host_ranks(self) -> list[int]:
        """Returns the ranks of this rank's host and container, ascending, once all ranks of the world have called it.

        It is called once.
        """
        here = host_identity().hex()
        self._store.set(f"{here}/{self._store.add(here, 1)}", str(self.rank))
        self._wait()
        return sorted(int(self._store.get(f"{here}/{number + 1}")) for number in range(self._store.add(here, 0)))

    def exchange(self, mine: str, ranks: list[int]) -> dict[int, str]:
        """Returns the texts of some ranks, this one among them, once all ranks of the world have called it.

        It is called once.
        """
        self._store.set(f"of/{self.rank}", mine)
        self._wait()
        return {rank: mine if rank == self.rank else self._store.get(f"of/{rank}").decode() for rank in ranks}

    def _wait(self) -> None:
        """Waits until all ranks of the world call it."""
        come = torch.ones(1, device=self._device)
        dist.all_reduce(come)
        come.item()  # NCCL only enqueues a collective


def _num_groups() -> int:
    """Returns the number of process groups that this rank is in."""
    return len(dist.distributed_c10d._world.pg_names)


def _num_calls() -> int:
    """Returns torch's own count of groups that this rank called for, which not every version advances for each."""
    return dist.distributed_c10d._world.group_count
