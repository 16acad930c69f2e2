"""Dropout by token, name and feature: the share, one mask however values are cut, and other masks for other names."""

from itertools import combinations

import pytest
import torch

from tk.parallel.token_noise import TokenNoise, word_of

TOKENS, FEATURES = 600, 200
NAME = word_of("model.layers.0.self_attn.q_proj.weight")


def noise(seed: int = 3, first_row: int = 0, rows: int = 6) -> TokenNoise:
    """Returns the random numbers of some rows' tokens."""
    length = TOKENS // 6
    numbers = torch.arange(first_row, first_row + rows).unsqueeze(1).expand(rows, length)
    return TokenNoise.of(seed, numbers, torch.arange(length).expand(rows, length))


def kept(mine: TokenNoise, share: float = 0.5, name: torch.Tensor = NAME) -> torch.Tensor:
    """Returns which values are not left out, [tokens, features]."""
    return mine.dropped(torch.ones(len(mine.keys_T), FEATURES), share, name, 0) != 0


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_share_is_left_out_and_the_rest_grows(share: float) -> None:
    values = torch.rand(TOKENS, FEATURES) + 1
    found = noise().dropped(values, share, NAME, 0)
    left_out = found == 0
    deviation = (share * (1 - share) / values.numel()) ** 0.5
    assert abs(left_out.double().mean() - share) < 4 * deviation
    torch.testing.assert_close(found[~left_out], values[~left_out] / (1 - share))
    for dim, number in ((0, TOKENS), (1, FEATURES)):  # of each feature and of each token
        shares = left_out.double().mean(dim=dim)
        assert (shares - share).abs().max() < 5 * (share * (1 - share) / number) ** 0.5 + 1 / number


def test_the_mask_does_not_depend_on_how_tokens_and_features_are_split() -> None:
    whole = kept(noise())
    values = torch.ones(TOKENS, FEATURES)
    cuts = [noise().dropped(values[:, start : start + 40], 0.5, NAME, start) for start in range(0, FEATURES, 40)]
    assert torch.equal(torch.cat(cuts, dim=1) != 0, whole)
    rows = [kept(noise(first_row=first, rows=2)) for first in (0, 2, 4)]
    assert torch.equal(torch.cat(rows), whole)
    length = TOKENS // 6
    places = torch.arange(1, length, 3)  # as a context-parallel rank has them
    dealt = TokenNoise.of(3, torch.arange(6).unsqueeze(1).expand(6, len(places)), places.expand(6, len(places)))
    assert torch.equal(kept(dealt), whole.unflatten(0, (6, length))[:, places].flatten(0, 1))
    block = noise().at(slice(10, 30), length)
    assert torch.equal(kept(block), whole.unflatten(0, (6, length))[:, 10:30].flatten(0, 1))


def test_other_names_tokens_rows_and_seeds_have_other_masks() -> None:
    mask, share = kept(noise()), 0.5
    others = {
        "name": kept(noise(), name=word_of("model.layers.1.self_attn.q_proj.weight")),
        "seed": kept(noise(seed=4)),
        "row": kept(noise(first_row=6)),
        "far row": kept(noise(first_row=2**20)),
        "token": mask.roll(1, dims=0),
        "feature": mask.roll(1, dims=1),
        "same": mask,
    }
    for (name, one), (other, two) in combinations(others.items(), 2):
        agree = (one == two).double().mean()
        assert abs(agree - share) < 4 * (share * (1 - share) / mask.numel()) ** 0.5, (name, other)


def test_the_dtype_stays_and_values_are_not_written() -> None:
    values = torch.ones(TOKENS, FEATURES, dtype=torch.bfloat16)
    found = noise().dropped(values, 0.5, NAME, 0)
    assert (found.dtype, set(found.unique().tolist())) == (torch.bfloat16, {0.0, 2.0})
    assert torch.equal(values, torch.ones_like(values))
    assert torch.equal(noise().dropped(values, 0.0, NAME, 0), values)
