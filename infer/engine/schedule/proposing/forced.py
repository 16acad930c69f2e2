"""Proposals and constraints: a constraint forces some tokens and forbids others.

A grammar often allows a single text to go on: the rest of a key, quotes, colons. Each of its tokens would take a step,
in which nothing is left to choose. They are proposals that come true, so that one step computes them all. Those that
a draft model makes without a look at the constraint are cut where it forbids one.
"""

from collections.abc import Sequence

from ...grammar.grammar import Matcher
from ...options import MAX_HEAD_ROWS
from ..samples.sample import Sample


def allowed_tokens(matcher: Matcher, proposals: Sequence[int]) -> list[int]:
    """Returns proposals up to the first one that a constraint does not allow, or that is not the forced token."""
    kept, state = list[int](), matcher
    for token in proposals:
        if state.is_complete or state.first_allowed([token]) != token or state.after(token).error is not None:
            break
        kept.append(token)
        state = state.after(token)
    return kept


def forced_tokens(samples: Sequence[Sample]) -> dict[Sample, list[int]]:
    """Returns the forced tokens behind the tokens of decoding samples, of those that have some.

    Where a sample's last token is not known yet, they are found only if it is forced, too. The rows of all samples stay
    as few as those of which workers keep the logits, since constraints choose among candidates then.
    """
    found, room = dict[Sample, list[int]](), MAX_HEAD_ROWS - len(samples)
    for sample in samples:
        output = sample.output
        # The first token after a prompt is left to the prompt's own step; see also `_samples` in live_request.py.
        if output.matcher is None or not output.tokens or sample.request.params.prompt_logprobs is not None:
            continue
        num_unknown = sample.num_tokens - sample.num_known
        most = min(room, output.max_tokens - sample.num_tokens - 1)
        if most <= 0:
            continue
        if chain := output.matcher.forced_chain(num_unknown + most)[num_unknown:]:
            found[sample] = chain
            room -= len(chain)
    return found
