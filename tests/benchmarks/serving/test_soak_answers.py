"""Answers of a soak: whole ones are compared as a whole, and those of callers that left as beginnings."""

from tk.benchmarks.serving.soak_answers import SoakAnswer


def test_an_answer_equals_the_same_samples_alone() -> None:
    whole = SoakAnswer(samples={0: ["ab", [1, 2], [], "stop"], 1: ["c", [3], [], "length"]})
    assert whole.equals(SoakAnswer(step=4, samples={1: ["c", [3], [], "length"], 0: ["ab", [1, 2], [], "stop"]}))
    assert not whole.equals(SoakAnswer(samples={0: ["ab", [1, 2], [], "stop"]}))
    assert not whole.equals(SoakAnswer(samples=dict(whole.samples), more=[b"x"]))


def test_a_beginning_has_the_first_tokens_of_every_sample() -> None:
    whole = SoakAnswer(samples={0: ["ab", [1, 2], [], "stop"]})
    assert SoakAnswer(status="CUT").begins(whole)
    assert SoakAnswer(status="CUT", samples={0: ["a", [1], [], ""]}).begins(whole)
    assert not SoakAnswer(status="CUT", samples={0: ["b", [1], [], ""]}).begins(whole)
    assert not SoakAnswer(status="CUT", samples={0: ["a", [2], [], ""]}).begins(whole)
    assert not SoakAnswer(status="CUT", samples={1: ["a", [1], [], ""]}).begins(whole)
