"""Proposals follow the text, and their chances the tokens that came."""

import random
from itertools import pairwise

from tk.infer.engine.schedule.samples.proposer import Proposer


class Reader:
    """A text that comes token by token, with all proposals whose chance is at least `least`; it counts steps."""

    def __init__(self, text: list[int], most: int, lag: int = 0, least: float = 0.25) -> None:
        self.steps = self.proposed = self.accepted = 0
        self.speculation = speculation = Proposer(most)
        known = 1
        while known + lag < len(text):
            new = text[len(speculation) : known]
            proposals, chances = speculation.propose(new, lag, len(text) - known - lag - 1)
            assert len(proposals) == len(chances) <= most
            assert all(1 > one >= other > 0 for one, other in pairwise(chances))
            proposals = [token for token, chance in zip(proposals, chances, strict=True) if chance >= least]
            came = text[known + lag :]
            right = 0
            while right < len(proposals) and proposals[right] == came[right]:
                right += 1
            self.steps += 1
            self.proposed += len(proposals)
            self.accepted += right
            known += 1 + right


def noise(count: int) -> list[int]:
    """Tokens two of which often stand together again, and are followed by anything."""
    choose = random.Random(2)
    return [choose.randrange(1000, 1020) for _ in range(count)]


def test_a_text_that_repeats_takes_few_steps() -> None:
    sentence = random.Random(1).sample(range(1000), 90)
    reader = Reader(sentence * 8, 8)
    assert reader.steps < 90 + 7 * 90 / 9 + 12
    assert reader.accepted > 0.95 * reader.proposed


def test_a_token_that_is_not_known_yet_is_passed_over() -> None:
    sentence = random.Random(1).sample(range(1000), 90)
    assert Reader(sentence * 8, 8, lag=1).accepted > 500


def test_where_nothing_comes_true_proposals_become_rare() -> None:
    reader = Reader(noise(3000), 8)
    assert 0 < reader.proposed < 100
    assert reader.steps > 2900


def test_chances_are_learned_without_proposals() -> None:
    sentence, other = random.Random(2).sample(range(1000), 90), noise(400)
    chances = []
    for text in (sentence * 2, sentence * 4, other + other[-9:-7]):
        reader = Reader(text, 1, least=1.0)
        assert reader.proposed == 0
        chances += reader.speculation.propose(text[-1:], 0, 1)[1]
    assert chances[1] > chances[0] > 0.9
    assert chances[2] < 0.3


def test_after_a_stretch_without_repetition_proposals_come_back() -> None:
    sentence = list(range(3, 93))
    before, whole = Reader(noise(900), 8), Reader([*noise(900), *sentence * 6], 8)
    assert whole.steps - before.steps < 90 + 64 + 5 * 90 / 9 + 30


def test_it_goes_on_behind_a_token_that_was_replaced() -> None:
    sentence = list(range(100, 150))
    speculation = Proposer(4)
    assert speculation.propose([*sentence, *sentence[:20]], 0, 4)[0] == sentence[20:24]
    assert speculation.propose([7], 0, 4)[0] == sentence[21:25]
    assert speculation.propose([8], 0, 4) == ([], []), "it is a new text"
    assert speculation.propose([9, 102, 103], 0, 4)[0] == sentence[4:8]


def test_no_more_than_there_is_room_for() -> None:
    speculation = Proposer(8)
    assert speculation.propose([5, 6, 7, 5, 6], 0, 3)[0] == [7, 5, 6]
    assert speculation.propose([7], 0, 0) == ([], [])
    assert speculation.propose([5], 0, -1) == ([], [])
    assert len(speculation) == 7
