"""The amount and kind of a corpus's content, from which a first run is sized."""

from dataclasses import dataclass
from typing import Final

from ..core.errors import ConfigError
from .corpus import Corpus
from .examples import Chat

READ_AT_MOST: Final = 64 << 20  # bytes of files; the rest of a larger corpus is taken to be like its beginning


@dataclass(frozen=True, slots=True)
class CorpusFacts:
    """What a corpus holds.

    Attributes:
        num_bytes: the size of all text in UTF-8, without the marks of rows and decompressed; of a large corpus, about.
        num_documents: the number of texts or examples; of a large corpus, about.
        examples: whether it holds fine-tuning examples, of which only the answers are learned.
        chats: whether any of them is a conversation, which needs a chat template.
    """

    num_bytes: int
    num_documents: int
    examples: bool
    chats: bool


def corpus_facts(corpus: Corpus, most: int = READ_AT_MOST) -> CorpusFacts:
    """Reads a corpus up to `most` bytes of its files.

    Raises:
        ConfigError: the corpus cannot be read (see `Corpus.documents`), or it holds no text.
    """
    read = num_bytes = num_documents = 0
    examples = chats = False

    def advance(amount: int) -> None:
        nonlocal read
        read += amount

    for document in corpus.documents(advance):
        examples |= not isinstance(document, str)
        chats |= isinstance(document, Chat)
        num_bytes += len((document if isinstance(document, str) else document.text).encode(errors="replace"))
        num_documents += 1
        if read >= most:
            break
    if not num_bytes:
        raise ConfigError("There is no text to train on: every input is empty.")
    unread = max(1.0, corpus.num_bytes / read) if read >= most else 1.0
    return CorpusFacts(round(num_bytes * unread), round(num_documents * unread), examples, chats)
