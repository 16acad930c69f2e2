"""Proposals follow the text, and become rare where they do not come true."""

import random

from tk.infer.scheduling.speculation import Speculation


class Reader:
    """A text that comes token by token, with proposals as an engine asks for them; it counts steps."""

    def __init__(self, text: list[int], most: int, lag: int = 0) -> None:
        self.steps = self.proposed = self.accepted = 0
        speculation = Speculation(most)
        known = 1
        while known + lag < len(text):
            proposals = speculation.propose(text[len(speculation) : known], lag, len(text) - known - lag - 1)
            assert len(proposals) <= most
            came = text[known + lag :]
            right = 0
            while right < len(proposals) and proposals[right] == came[right]:
                right += 1
            self.steps += 1
            self.proposed += len(proposals)
            self.accepted += right
            known += 1 + right


def test_a_text_that_repeats_takes_few_steps() -> None:
    sentence = random.Random(1).sample(range(1000), 90)
    reader = Reader(sentence * 8, 8)
    assert reader.steps < 90 + 7 * 90 / 9 + 12
    assert reader.accepted > 0.95 * reader.proposed


def test_a_token_that_is_not_known_yet_is_passed_over() -> None:
    sentence = random.Random(1).sample(range(1000), 90)
    assert Reader(sentence * 8, 8, lag=1).accepted > 500


def test_where_nothing_comes_true_proposals_become_rare() -> None:
    choose = random.Random(2)
    pairs = [[1, 2, choose.randrange(10, 10**6)] for _ in range(1000)]  # 1 2 is followed by anything
    reader = Reader([token for pair in pairs for token in pair], 8)
    assert 0 < reader.proposed < 100
    assert reader.steps > 2900


def test_after_a_stretch_without_repetition_proposals_come_back() -> None:
    choose = random.Random(3)
    noise = [token for _ in range(300) for token in (1, 2, choose.randrange(10, 10**6))]
    sentence = list(range(3, 93))
    before, whole = Reader(noise, 8), Reader([*noise, *sentence * 6], 8)
    assert whole.steps - before.steps < 90 + 64 + 5 * 90 / 9 + 30


def test_no_more_than_there_is_room_for() -> None:
    speculation = Speculation(8)
    assert speculation.propose([5, 6, 7, 5, 6], 0, 3) == [7, 5, 6]
    assert speculation.propose([7], 0, 0) == []
    assert speculation.propose([5], 0, -1) == []
    assert len(speculation) == 7
