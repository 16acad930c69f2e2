"""The data of the built-in subject: texts that can be learned, and questions of which only the answers are learned."""

from random import Random
from typing import Final

from ..data.examples import PromptResponse

_NUM_WORDS: Final = 60


def texts() -> list[str]:
    """Returns texts of a small vocabulary, in which some words often follow others.

    Most are so short that a row holds several; others are longer than a row.
    """
    random = Random(0)
    words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 7))) for _ in range(_NUM_WORDS)]
    documents = []
    for number in range(2000):
        first = random.randrange(len(words))
        length = random.randint(5, 60) if number % 20 == 0 else random.randint(1, 2)
        documents.append(" ".join(_walk(words, first, length, random)) + "\n")
    return documents


def examples() -> list[PromptResponse]:
    """Returns questions with answers of one word. Some questions are so long that a row of them has no target."""
    random = Random(1)
    words = sorted({word for text in texts() for word in text.split()})
    found = []
    for number in range(800):
        first, length = random.randrange(len(words)), random.randint(5, 20) if number % 2 else random.randint(2, 3)
        *question, answer = _walk(words, first, length, random)
        found.append(PromptResponse(" ".join(question), f" {answer}\n"))
    return found


def _walk(words: list[str], place: int, length: int, random: Random) -> list[str]:
    walk = []
    for _ in range(length):
        place = (place * 7 + random.choice((1, 1, 1, 20))) % len(words)
        walk.append(words[place])
    return walk
