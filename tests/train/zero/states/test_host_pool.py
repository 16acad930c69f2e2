"""The pool of host buffers: it uses buffers again, and holds no more than was in use at one time."""

from random import Random

import pytest
import torch

from tk.tests.train.zero.states.test_buffer import Cudart
from tk.train.zero.states.buffer import PageBuffer
from tk.train.zero.states.host_pool import SLACK, HostPool


def test_a_buffer_is_used_again_for_its_size_and_a_little_less() -> None:
    pool = HostPool(pinned=False)
    first = pool.take(8000)
    assert first.memory.nbytes == 8000, "exactly what was asked for"
    pool.give_back(first)
    assert pool.take(8000) is first
    pool.give_back(first)
    assert pool.take(7200) is first
    second = pool.take(8000)
    assert second is not first
    assert pool.held == pool.in_use == pool.most == 16000
    pool.give_back(second)
    assert pool.take(8000 - 8000 // SLACK - 1000) is not second, "it would leave too much empty"


def test_a_buffer_that_fits_nothing_makes_room_for_another() -> None:
    pool = HostPool(pinned=False)
    for buffer in [pool.take(5000), pool.take(3000)]:
        pool.give_back(buffer)
    assert pool.held == 8000
    taken = pool.take(6000)
    assert pool.held <= 8000, "one of the free ones was given up"
    pool.give_back(taken)
    assert pool.in_use == 0
    assert pool.take(9000).memory.nbytes == 9000
    assert pool.held == 9000


def test_what_is_given_up_is_pinned_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    pool = HostPool(pinned=True)
    pool.give_back(pool.take(5000))
    assert list(cudart.registered.values()) == [5000]
    pool.give_back(pool.take(9000))
    assert list(cudart.registered.values()) == [9000]
    del pool
    assert cudart.registered == {}


def test_steps_of_the_same_sizes_make_no_buffers_after_the_first_one() -> None:
    pool, random, seen = HostPool(pinned=False), Random(0), []
    sizes = [random.randrange(5000, 50000) for _ in range(30)]
    for _ in range(4):
        taken = [pool.take(size) for size in sizes]
        random.shuffle(taken)
        seen.append({id(buffer) for buffer in taken})
        for buffer in taken:
            pool.give_back(buffer)
    assert seen[0] == seen[-1]
    assert pool.held == pool.most == sum(sizes)


def test_sizes_that_always_change_never_hold_more_than_was_in_use_at_one_time() -> None:
    pool, random, taken = HostPool(pinned=False), Random(1), list[PageBuffer]()
    for _ in range(2000):
        if taken and random.random() < 0.5:
            pool.give_back(taken.pop(random.randrange(len(taken))))
        else:
            nbytes = random.randrange(1, 10000)
            taken.append(pool.take(nbytes))
            assert nbytes <= taken[-1].memory.nbytes <= nbytes + nbytes // SLACK
        assert pool.held <= pool.most
    assert pool.in_use == sum(buffer.memory.nbytes for buffer in taken)
