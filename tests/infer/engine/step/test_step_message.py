"""Messages of steps come back from their bytes, and a plain continuation takes four bytes."""

from dataclasses import fields

import numpy as np
import pytest

from tk.infer.engine.step.step_message import OPENED, GivenTokens, NextTokens, StepMessage, decode_message


def message(spans: int, opened: int) -> StepMessage:
    """Returns a message whose sections have different lengths and values."""
    numbers = iter(range(1000))

    def ints(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        size = int(np.prod(shape))
        return np.array([next(numbers) for _ in range(size)], np.int32).reshape(shape)

    slots = np.zeros(opened, OPENED)
    slots["seed"], slots["top_p"] = 2**64 - 1, 0.25
    values = np.array([0.5, -np.inf][:opened], np.float32)
    return StepMessage(
        ints(spans, 8),
        ints(5),
        ints(3),
        ints(2, 2),
        ints(1, 4),
        slots,
        ints(opened),
        values,
        ints(1),
        ints(0, 2),
        ints(4, 3),
    )


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize(("spans", "opened"), [(1, 0), (3, 2)])
def test_a_message_comes_back_from_its_bytes(kind: type[bytes], spans: int, opened: int) -> None:
    sent = message(spans, opened)
    found = decode_message(kind(sent.encode()))
    assert isinstance(found, StepMessage)
    for field in fields(StepMessage):
        one, two = getattr(found, field.name), getattr(sent, field.name)
        assert (one.dtype, one.shape) == (two.dtype, two.shape), field.name
        assert one.tobytes() == two.tobytes(), field.name


@pytest.mark.parametrize("blocks", [[], [[0, 7], [3, 9]]])
def test_a_continuation_has_its_new_blocks_alone(blocks: list[list[int]]) -> None:
    data = NextTokens(np.array(blocks, np.int32).reshape(-1, 2)).encode()
    assert len(data) == 4 + 8 * len(blocks)
    found = decode_message(data)
    assert isinstance(found, NextTokens)
    assert found.blocks.tolist() == blocks


@pytest.mark.parametrize("blocks", [[], [[0, 7, 2], [1, 9, 3]]])
def test_given_tokens_come_back_and_are_those_of_slots(blocks: list[list[int]]) -> None:
    spans, tokens = np.array([[5, 3, 1, 3], [9, 1, 4, 1], [2, 2, 0, 1]], np.int32), [8, 30, 31, -1, 6, 7]
    sent = GivenTokens(spans, np.array(tokens, np.int32), np.array(blocks, np.int32).reshape(-1, 3))
    found = decode_message(bytearray(sent.encode()))
    assert isinstance(found, GivenTokens)
    assert (found.spans.tolist(), found.tokens.tolist(), found.blocks.tolist()) == (spans.tolist(), tokens, blocks)
    message = found.of_slots(np.array([4, 0, 2], np.int32))
    added = [1, 1, 0] if blocks else [0, 0, 0]
    assert message.spans.tolist() == [
        [4, 5, 3, 3, 1, 3, added[0], -1],
        [0, 9, 1, 0, 4, 1, added[1], -1],
        [2, 2, 2, 2, 0, 1, 0, -1],
    ]
    assert (message.tokens.tolist(), message.blocks.tolist()) == ([8, 30, 31, 6, 7], [block[2] for block in blocks])
