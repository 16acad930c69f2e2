"""Tokenizers of the families that models come with, small: their folders, by the name of the family."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tk.text.tokenizer import Tokenizer

CORPUS: Final = [
    'import os\nimport re\n\nthe theory of "the other" is: 12, 345 or [6, 7].\n',
    'the café  the naïve\t{"name": "the", "age": 12, "list": [1, 2, 3], "ok": true, "other": null}\n',
    "abc ab a b c yes no maybe the the ab ab abc  abc   abc Yes No Maybe {} [] () true false null\n",
    "0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz .,:;!?-_+*/=<>|&%$#@^~`'\"\\()[]{}\n",
]
_WORDS: Final = (  # Llama 3's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_BYTES: Final = [f"<0x{byte:02X}>" for byte in range(256)]
_SPECIAL: Final = ["<unk>", "<s>", "</s>"]


def folder_of(family: str, parent: Path) -> Path:
    """Writes the tokenizer of a family below `parent`, unless it is there; returns its folder."""
    folder = parent / family
    if not folder.is_dir():
        folder.mkdir()
        (folder / "tokenizer.json").write_text(_FAMILIES[family]())
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def tokenizer_of(family: str, parent: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Returns the tokenizer of a family and the library's own, of the same file."""
    folder = folder_of(family, parent)
    return Tokenizer.from_folder(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def _begun_by(token: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, _SPECIAL.index(token))])


def _byte_level(split: Any, normalizer: Any = None, processor: Any = None) -> tokenizers.Tokenizer:
    """Byte-level BPE as GPT-2 has it; words are split as `split` says."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = split
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processor or processors.ByteLevel(trim_offsets=True)
    return made


def _gpt2() -> str:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)).to_str()


def _regex_and_bytes() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3() -> str:
    both = processors.Sequence([processors.ByteLevel(trim_offsets=True), _begun_by("<s>")])
    return _byte_level(_regex_and_bytes(), processor=both).to_str()


def _qwen() -> str:
    made = _byte_level(_regex_and_bytes(), normalizers.NFC())
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made.to_str()


def _added() -> str:
    """Added tokens that take spaces with them, that are whole words only, and that have spaces of their own."""
    made = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))
    made.add_tokens(
        [
            AddedToken("<left>", lstrip=True),
            AddedToken("<right>", rstrip=True),
            AddedToken("word", single_word=True),
            AddedToken("two words"),
        ]
    )
    made.add_special_tokens([AddedToken("<both>", lstrip=True, rstrip=True)])
    return made.to_str()


def _pieces(decoder: Any, normalizer: Any = None, split: Any = None) -> str:
    """BPE with a mark for the space and a token for each byte, as SentencePiece makes it; <s> begins a text."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    words = [" " + word for text in CORPUS for word in text.split(" ") if word.isascii()] + ["  ", "   "]
    learned = [word.replace(" ", "▁") for word in words if "\n" not in word and "\t" not in word]
    trainer = trainers.BpeTrainer(vocab_size=430, special_tokens=[*_SPECIAL, *_BYTES], show_progress=False)
    made.train_from_iterator(learned, trainer)
    plain = json.loads(made.to_str())
    plain["added_tokens"] = plain["added_tokens"][: len(_SPECIAL)]
    made = tokenizers.Tokenizer.from_str(json.dumps(plain))
    if normalizer is not None:
        made.normalizer = normalizer
    if split is not None:
        made.pre_tokenizer = split
    made.decoder = decoder
    made.post_processor = _begun_by("<s>")
    return made.to_str()


def _fused(*last: Any) -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])


def _llama2() -> str:
    legacy = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _pieces(_fused(decoders.Strip(" ", 1, 0)), legacy)


def _mistral() -> str:
    split = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _pieces(_fused(decoders.Strip(" ", 1, 0)), split=split)


def _gemma() -> str:
    return _pieces(_fused(), normalizers.Replace(" ", "▁"))


def _metaspace_never() -> str:
    decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="never"), decoders.ByteFallback()])
    return _pieces(decoder, split=pre_tokenizers.Metaspace(prepend_scheme="never"))


def _metaspace_always() -> str:
    decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="always"), decoders.ByteFallback()])
    return _pieces(decoder, split=pre_tokenizers.Metaspace(prepend_scheme="always"))


def _strip_each() -> str:
    """A decoder that strips every token, since nothing joins them before."""
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", "  "), decoders.Strip(" ", 1, 0)])
    return _pieces(decoder, normalizers.Replace(" ", "▁"))


def _t5() -> str:
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=180, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return made.to_str()


def _bert() -> str:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=True)
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=_SPECIAL, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return made.to_str()


def _words() -> str:
    """Whole words and no decoder: a space joins them."""
    vocab = {word: number for number, word in enumerate([*_SPECIAL, *"abc", "the", "os", "import", "yes", "no", "12"])}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(_SPECIAL)
    return made.to_str()


_FAMILIES: Final[Mapping[str, Callable[[], str]]] = {
    "gpt2": cache(_gpt2),
    "llama3": cache(_llama3),
    "qwen": cache(_qwen),
    "added": cache(_added),
    "llama2": cache(_llama2),
    "mistral": cache(_mistral),
    "gemma": cache(_gemma),
    "metaspace never": cache(_metaspace_never),
    "metaspace always": cache(_metaspace_always),
    "strip each": cache(_strip_each),
    "t5": cache(_t5),
    "bert": cache(_bert),
    "words": cache(_words),
}
FAMILIES: Final = tuple(_FAMILIES)


def impatient(folder: Path) -> Path:
    """Writes a tokenizer with a regular expression that takes more time than the library allows; returns its folder."""
    document = json.loads(_gpt2())
    document["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"(a|aa)+$|."}, "behavior": "Isolated", "invert": False},
            document["pre_tokenizer"],
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


TOO_MUCH: Final = "a" * 60 + "b"  # for `impatient`


def all_texts() -> Iterator[str]:
    """Yields texts with all that a border between two can cut: words, spaces, lines, characters of several bytes."""
    yield from (
        "import os",
        "the theory",
        "a  b",
        "a\n\n b",
        "caf\u00e9 ☃\u20ac the",
        "abc",
        '{"name": "ab"}',
        " the",
        "e\u0301a",
    )
