"""The tokens of two texts as one, and the border between them, for every family of tokenizers."""

import pytest

from tk.tests.text.families import FAMILIES, all_texts, tokenizer_of


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_has_the_tokens_that_end_in_it(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    ours, theirs = tokenizer_of(family, tmp_path_factory.getbasetemp())
    num_spanning = 0
    for text in all_texts():
        whole = theirs.encode(text)
        texts = [i for i, added in enumerate(whole.special_tokens_mask) if not added]
        for cut in range(len(text) + 1):
            ids, num_prompt = ours.encode_pair(text[:cut], text[cut:])
            assert ids == whole.ids[: texts[-1] + 1], "tokenized as one, without what follows a text"
            before, after = whole.offsets[:num_prompt], whole.offsets[num_prompt : len(ids)]
            assert all(stop <= cut for _, stop in before)
            assert not text[cut:].strip() or any(stop > cut for _, stop in after)
            num_spanning += any(start < cut < stop for start, stop in after[:1])
            if cut == 0:
                assert num_prompt == texts[0]
    assert num_spanning > 2, "some tokens do span the border"


def test_spaces_alone_are_a_continuation(tmp_path_factory: pytest.TempPathFactory) -> None:
    ours, theirs = tokenizer_of("gpt2", tmp_path_factory.getbasetemp())
    for prompt, continuation in (("a", "  "), ("a\n", " "), ("a", " ")):
        ids, num_prompt = ours.encode_pair(prompt, continuation)
        assert num_prompt < len(ids), "its offsets are not trimmed"
        assert theirs.decode(ids) == prompt + continuation
