"""Sampling parameters that all differ from their defaults, for tests of the objects that carry them."""

from tk.infer.engine.request.sampling_params import SamplingParams

EVERY_OPTION = SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias={4: -2.0, 0: 1.0},
    seed=2**64 - 1,
    n=2,
    max_new_tokens=11,
    min_new_tokens=2,
    stop=("x", "yz"),
    stop_token_ids=(4, 0),
    ignore_eos=True,
    logprobs=0,
    prompt_logprobs=3,
    keep_special_tokens=True,
    include_stop=True,
)
