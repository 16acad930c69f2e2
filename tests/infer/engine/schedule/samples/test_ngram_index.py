"""The index of n-grams against a search of the whole text."""

import random

import pytest

from tk.infer.engine.schedule.samples.ngram_index import LONGEST, SHORTEST, NgramIndex


def searched(tokens: list[int], count: int, longest: int = LONGEST) -> list[int]:
    """The continuation, by looking everywhere."""
    stop = len(tokens)
    for size in range(longest, SHORTEST - 1, -1):
        places = [i for i in range(size, stop) if tokens[i - size : i] == tokens[stop - size :]]
        if places and stop >= size:
            place = places[-1]
            return [tokens[place + i % (stop - place)] for i in range(count)]
    return []


def continued(index: NgramIndex, count: int) -> list[int]:
    """The continuation, by the index."""
    place, size = index.find()
    return index.continuation(place, count) if size else []


@pytest.mark.parametrize("vocab", [2, 6, 200])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_the_last_place_of_the_longest_ngram_is_found(vocab: int, seed: int) -> None:
    choose = random.Random(seed)
    index, tokens, same, num_found = NgramIndex(), list[int](), 0, 0
    for _ in range(400):
        more = [choose.randrange(vocab) for _ in range(choose.choice((0, 1, 1, 1, 2, 50)))]
        index.extend(more)
        tokens += more
        found, expected = continued(index, 7), searched(tokens, 7)
        num_found += bool(expected)
        if found == expected:
            same += 1
            continue
        shorter = [searched(tokens, 7, longest) for longest in range(SHORTEST - 1, LONGEST)]
        assert found in shorter, "a find of a shorter n-gram at worst"
    assert len(index) == len(tokens)
    assert index.continuation(3, 6) == tokens[3:9]
    assert num_found > (0 if vocab == 200 else 100)
    assert same >= 360, "entries are rarely taken by other n-grams"


def test_one_by_one_and_all_at_once_are_the_same() -> None:
    choose = random.Random(5)
    tokens = [choose.randrange(40) for _ in range(3000)]
    slow, fast = NgramIndex(), NgramIndex()
    fast.extend(tokens)
    for token in tokens:
        slow.extend([token])
    num_same = 0
    for more in ([], *([choose.randrange(40)] for _ in range(100))):
        tokens += more
        slow.extend(more)
        fast.extend(more)
        num_same += continued(slow, 9) == continued(fast, 9) == searched(tokens, 9)
    assert num_same > 70, "which of two n-grams has a common entry depends on their order"


def test_a_loop_goes_round() -> None:
    index = NgramIndex()
    index.extend([9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert continued(index, 7) == [3, 1, 2, 3, 1, 2, 3]
    index.extend([8])
    assert continued(index, 7) == []
    assert NgramIndex().find() == (0, 0)


def test_a_collision_shows_nothing_wrong() -> None:
    choose = random.Random(1)
    index, tokens = NgramIndex(), [choose.randrange(10**9) for _ in range(20000)]
    index.extend(tokens)
    for _ in range(200):
        index.extend([choose.randrange(10**9)])
        assert continued(index, 1) == []
