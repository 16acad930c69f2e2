"""The turns of principals whose conversations wait to be rendered."""

from tk.text.chat_queue import ChatQueue


def queue_of(most_each: int, waiting: str) -> ChatQueue[str]:
    """A queue in which principals of one letter wait, each conversation by its place: "aab" -> a0 a1 b2."""
    queue: ChatQueue[str] = ChatQueue(most_each)
    for place, principal in enumerate(waiting):
        queue.add(principal, f"{principal}{place}")
    return queue


def test_principals_take_turns_and_keep_their_own_order() -> None:
    queue, taken = queue_of(1, "aaabcab"), []
    while (conversation := queue.take()) is not None:
        taken.append(conversation)
        queue.end(conversation[0])
    assert taken == ["a0", "b3", "c4", "a1", "b6", "a2", "a5"]


def test_a_principal_has_at_most_its_places_and_who_has_fewest_is_next() -> None:
    queue = queue_of(2, "aaaa")
    assert [queue.take(), queue.take(), queue.take()] == ["a0", "a1", None]
    assert not queue.can_take
    queue.add("b", "b")
    queue.add("b", "c")
    queue.end("a")
    assert [queue.take(), queue.take(), queue.take(), queue.take()] == ["b", "a2", "c", None]


def test_what_waits_is_drained() -> None:
    queue = queue_of(1, "abab")
    assert queue.take() == "a0"
    assert sorted(queue.drain()) == ["a2", "b1", "b3"]
    assert queue.take() is None
