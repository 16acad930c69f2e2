"""Token folders: the tokens of many documents in memory-mapped files.

folder/tokens.bin    token ids, uint16 (vocabularies up to 65536) or uint32, little endian; eos ends each text
folder/index.bin     num_documents + 1 offsets into tokens, int64, little endian: 0 first, num_tokens last
folder/mask.bin      fine-tuning data only: a byte per token, 1 if the loss counts it as a target, else 0
folder/meta.json     the sizes of the other files and their SHA-256
folder/tokenizer.json ...   the tokenizer that made the tokens, so that the folder is a tokenizer's folder too
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_files import SIDE_FILES

FORMAT: Final = "tk-tokens"
VERSION: Final = 1
FILES: Final = frozenset({"tokens.bin", "index.bin", "mask.bin", "meta.json", *SIDE_FILES})
_HASH_CHUNK: Final = 1 << 24


@dataclass(frozen=True)
class TokenMeta:
    """The content of meta.json; `fingerprint` is a hash of the other fields."""

    vocab_size: int
    dtype: str
    num_tokens: int
    num_documents: int
    eos_token_id: int
    tokenizer_sha256: str
    tokens_sha256: str
    index_sha256: str
    mask_sha256: str = ""  # "" if the folder has no mask.bin; meta.json then lacks the field
    format: str = FORMAT
    version: int = VERSION

    @property
    def fingerprint(self) -> str:
        """A hash of the content: equal if and only if tokens, documents and tokenizer are equal."""
        return hashlib.sha256(json.dumps(self._stored(), sort_keys=True).encode()).hexdigest()

    def _stored(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value != ""}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads meta.json.

        Raises:
            ConfigError: it is missing, damaged or of another format.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path.parent} is not a token folder: it has no {path.name}. Make one with `tk data prepare`."
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read: {error}. Prepare the data again.") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ConfigError(
                f"{path} does not describe a token folder (format {FORMAT!r}): make one with `tk data prepare`."
            )
        if document.get("version") != VERSION:
            raise ConfigError(
                f"{path} has version {document.get('version')!r}, but this tk reads version {VERSION}: prepare the "
                "data again."
            )
        fingerprint = document.pop("fingerprint", None)
        document = {"mask_sha256": "", **document}
        kinds = cls.__annotations__
        if set(document) != set(kinds) or any(type(document[name]) is not kind for name, kind in kinds.items()):
            raise ConfigError(
                f"{path} is damaged: it must have exactly the fields {', '.join(kinds)}, each of its type. Prepare the "
                "data again."
            )
        meta = cls(**document)
        if meta.fingerprint != fingerprint or meta.dtype not in ("uint16", "uint32"):
            raise ConfigError(f"{path} is damaged: its fingerprint does not match its fields. Prepare the data again.")
        return meta

    def to_json(self) -> dict[str, Any]:
        """Returns the content of meta.json."""
        return {**self._stored(), "fingerprint": self.fingerprint}


class TokenFile:
    """A token folder, opened for reading.

    Attributes:
        path: the folder.
        meta: the sizes and hashes of its files.
        document_offsets: int64 [num_documents + 1], memory-mapped.
    """

    def __init__(self, folder: Path | str) -> None:
        """Opens a folder and checks sizes and offsets; `verify` checks every byte.

        Raises:
            ConfigError: the folder is not a token folder, or a file is missing, truncated or contradicts meta.json.
        """
        self.path = Path(folder)
        self.meta = TokenMeta.read(self.path / "meta.json")
        self._tokens = self._map("tokens.bin", np.dtype(self.meta.dtype).newbyteorder("<"), self.meta.num_tokens)
        self.document_offsets = self._map("index.bin", np.dtype("<i8"), self.meta.num_documents + 1)
        offsets = self.document_offsets
        if offsets[0] != 0 or offsets[-1] != self.meta.num_tokens or bool(np.any(offsets[1:] <= offsets[:-1])):
            raise ConfigError(
                f"{self.path / 'index.bin'} is damaged: its offsets must rise from 0 to {self.meta.num_tokens}. "
                "Prepare the data again."
            )
        self._mask = self._map("mask.bin", np.dtype("u1"), self.meta.num_tokens) if self.masked else None

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all documents."""
        return self.meta.num_tokens

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the tokenizer."""
        return self.meta.vocab_size

    @property
    def tokenizer_sha256(self) -> str:
        """The SHA-256 of tokenizer.json."""
        return self.meta.tokenizer_sha256

    @property
    def fingerprint(self) -> str:
        """A hash of the content."""
        return self.meta.fingerprint

    @property
    def masked(self) -> bool:
        """Whether the folder has a mask: fine-tuning data, of which some tokens are not learned."""
        return self.meta.mask_sha256 != ""

    def _map(self, name: str, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
        path, expected = self.path / name, length * dtype.itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"Cannot read {path}: {error.strerror}. Prepare the data again.") from error
        if size != expected:
            raise ConfigError(
                f"{path} has {size} bytes, but by meta.json it must have {expected}. Prepare the data again."
            )
        if size == 0:
            raise ConfigError(f"{path} is empty: there is nothing to train on. Prepare the data again.")
        return np.memmap(path, dtype=dtype, mode="r", shape=(length,))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the tokens [start, stop) as int64.

        Raises:
            ConfigError: an id is outside of the vocabulary: the file is damaged.
        """
        tokens = self._tokens[start:stop].astype(np.int64)
        highest = int(tokens.max(initial=0))
        if highest >= self.meta.vocab_size:
            raise ConfigError(
                f"{self.path / 'tokens.bin'} is damaged: token {int(tokens.argmax()) + start} is {highest}, but the "
                f"vocabulary has {self.meta.vocab_size} ids. Prepare the data again."
            )
        return tokens

    def learned(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Returns for each of the tokens [start, stop) whether the loss counts it; all True if there is no mask."""
        if self._mask is None:
            return np.ones(stop - start, np.bool_)
        learned: NDArray[np.bool_] = self._mask[start:stop] != 0
        return learned

    def verify(self) -> None:
        """Reads every byte and checks it.

        Raises:
            ConfigError: a file does not match its SHA-256 in meta.json.
        """
        hashes = {"tokens.bin": self.meta.tokens_sha256, "index.bin": self.meta.index_sha256}
        if self.masked:
            hashes["mask.bin"] = self.meta.mask_sha256
        for name, expected in hashes.items():
            digest = hashlib.sha256()
            with (self.path / name).open("rb") as file:
                while chunk := file.read(_HASH_CHUNK):
                    digest.update(chunk)
            if digest.hexdigest() != expected:
                raise ConfigError(
                    f"{self.path / name} is damaged: its SHA-256 is not the one in meta.json. Prepare the data again."
                )


class TokenFileWriter:
    """Writes the files of a token folder into an existing folder; a context in which `finish` is called at the end.

    Args:
        tokenizer: the tokenizer that made the tokens.
        eos_token_id: the token that ends each text.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.folder, self.tokenizer, self.eos_token_id = folder, tokenizer, eos_token_id
        self.num_tokens = 0
        self.num_documents = 0
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._digests = {name: hashlib.sha256() for name in ("tokens.bin", "index.bin")}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._files = {name: stack.enter_context((self.folder / name).open("wb")) for name in self._digests}
            self._stack = stack.pop_all()
        self._write("index.bin", np.zeros(1, "<i8"))
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def add_example(self, ids: Sequence[int], learned: Sequence[bool]) -> None:
        """Adds a whole document of fine-tuning data.

        Args:
            ids: the token ids.
            learned: for each token, whether the loss counts it as a target.
        """
        if "mask.bin" not in self._digests:
            self._begin_mask()
        self._write_tokens(ids)
        self._write("mask.bin", np.asarray(learned, "u1"))
        self._end()

    def append(self, ids: Sequence[int]) -> None:
        """Adds tokens to the current document."""
        self._write_tokens(ids)
        if "mask.bin" in self._digests:
            self._write("mask.bin", np.ones(len(ids), "u1"))

    def end_document(self) -> None:
        """Ends the current document with eos."""
        self.append([self.eos_token_id])
        self._end()

    def _begin_mask(self) -> None:
        """Creates the mask at the first example, with ones for all tokens of the texts before it."""
        self._files["mask.bin"] = self._stack.enter_context((self.folder / "mask.bin").open("wb"))
        self._digests["mask.bin"] = hashlib.sha256()
        for start in range(0, self.num_tokens, _HASH_CHUNK):
            self._write("mask.bin", np.ones(min(_HASH_CHUNK, self.num_tokens - start), "u1"))

    def _write_tokens(self, ids: Sequence[int]) -> None:
        self._write("tokens.bin", np.asarray(ids, self.dtype))
        self.num_tokens += len(ids)

    def _end(self) -> None:
        self._write("index.bin", np.asarray([self.num_tokens], "<i8"))
        self.num_documents += 1

    def _write(self, name: str, values: NDArray[Any]) -> None:
        data = values.tobytes()
        self._files[name].write(data)
        self._digests[name].update(data)

    def finish(self) -> TokenMeta:
        """Writes meta.json after the last document and returns its content.

        Raises:
            ConfigError: no document was added.
        """
        if not self.num_documents:
            raise ConfigError("The inputs have no text, so nothing was written. Name files or folders that hold text.")
        meta = TokenMeta(
            vocab_size=self.tokenizer.vocab_size,
            dtype="uint16" if self.dtype.itemsize == 2 else "uint32",
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            eos_token_id=self.eos_token_id,
            tokenizer_sha256=self.tokenizer.sha256,
            tokens_sha256=self._digests["tokens.bin"].hexdigest(),
            index_sha256=self._digests["index.bin"].hexdigest(),
            mask_sha256=self._digests["mask.bin"].hexdigest() if "mask.bin" in self._digests else "",
        )
        (self.folder / "meta.json").write_text(json.dumps(meta.to_json(), indent=2) + "\n", encoding="utf-8")
        return meta
