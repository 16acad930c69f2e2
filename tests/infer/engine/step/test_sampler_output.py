"""Results of a step there and back, and joined."""

from dataclasses import fields, replace

import numpy as np

from tk.infer.engine.step.sampler_output import NUM_CANDIDATES, SamplerOutput


def test_a_result_comes_back_from_its_bytes() -> None:
    scored = SamplerOutput(
        token_ids=np.array([5, 9], np.int32),
        finite=np.array([1, 0], np.uint8),
        logprob=np.array([-0.5, 0], np.float32),
        rank=np.array([2, 0], np.int32),
        top_ids=np.array([[5, 3], [0, 0]], np.int32),
        top_logprobs=np.array([[-0.5, -2], [0, 0]], np.float32),
        candidates=np.zeros((2, 0), np.int32),
    )
    none = np.zeros((2, 0), np.int32)
    plain = replace(scored, logprob=np.zeros(2, np.float32), rank=none.sum(1, np.int32), top_ids=none)
    plain = replace(plain, top_logprobs=none.astype(np.float32))
    asked = np.arange(2 * NUM_CANDIDATES, dtype=np.int32).reshape(2, NUM_CANDIDATES)
    for output in (scored, plain, replace(scored, candidates=asked), replace(plain, candidates=asked)):
        again = SamplerOutput.decode(output.encode())
        for f in fields(SamplerOutput):
            one, two = getattr(again, f.name), getattr(output, f.name)
            was_asked = f.name in ("token_ids", "finite", "candidates") or output.rank.any()
            assert one.dtype == two.dtype
            assert one.tolist() == two.tolist() if was_asked and two.size else not one.size


def test_outputs_are_joined_with_the_widest_columns() -> None:
    tokens, finite, asked = np.array([4], np.int32), np.ones(1, np.uint8), np.arange(3, dtype=np.int32)[None]
    parts = [SamplerOutput.of_tokens(tokens, finite), SamplerOutput.of_tokens(tokens, finite, asked)]
    assert SamplerOutput.join(parts).candidates.tolist() == [[-1, -1, -1], [0, 1, 2]]
