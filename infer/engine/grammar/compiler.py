"""The building and keeping of grammars: for the grammar library, with its limits, and with its errors in our words."""

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ....core.errors import CheckpointError, InvalidRequest
from ....core.extras import install_line
from ....core.integers import ceil_div
from ....text.library_errors import failing_as
from ....text.tokenizer import Tokenizer
from .grammar import MASK_WORD, NO_TOKEN, Constraint, FirstState, Grammar, first_line, mask_of
from .vocabulary import Place, Vocabulary, place_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_BYTES: Final = 1 << 18  # of a constraint's text
NUM_KEPT: Final = 32  # a simple grammar has some hundred KiB, and one with as many states as it may have 25 MiB
_JSON: Final = {"whitespace_flexible": False, "lenient": False}  # wins over a schema's own "x-guidance"
# The limits of a grammar: its symbols, the work of building it (about 20 ms), states of its lexer (1 to 2 KiB each).
_GRAMMAR_SIZE: Final = 200_000
_BUILD_FUEL: Final = 1_000_000
_LEXER_STATES: Final = 50_000
# The limits of a mask: items of a row of the parser; the work of the lexer (about 7 ms) and of the parser (about 3 ms).
_ROW_ITEMS: Final = 2_000
_MASK_FUEL: Final = 100_000
_MASK_ITEMS: Final = 50_000


class MissingExtra(InvalidRequest):
    """A request that needs an optional package which is not installed where the model is served."""

    grpc_status = "UNIMPLEMENTED"


class KeptGrammars:
    """The grammars of principals, who share none: the time to build one would show which ones others use.

    Above the bound, the principal with the most grammars loses the one that it has not used for longest. All methods
    may be called from any thread.

    Args:
        most: the number of grammars of all principals.
    """

    def __init__(self, most: int = NUM_KEPT) -> None:
        self._most = most
        self._lock = threading.Lock()  # guards all below
        self._kept: OrderedDict[tuple[str, Hashable], Grammar] = OrderedDict()  # the one used last is last

    def find(self, principal: str, name: Hashable) -> Grammar | None:
        """Returns a principal's grammar, unless it is worn."""
        with self._lock:
            grammar = self._kept.get((principal, name))
            if grammar is None or grammar.is_worn:
                return None
            self._kept.move_to_end((principal, name))
            return grammar

    def add(self, principal: str, name: Hashable, grammar: Grammar) -> None:
        """Keeps a grammar, and lets go of worn ones and of those above the bound."""
        with self._lock:
            self._kept.pop((principal, name), None)
            self._kept[principal, name] = grammar
            for worn in [key for key, each in self._kept.items() if each.is_worn]:
                del self._kept[worn]
            while len(self._kept) > self._most:
                counts = Counter(owner for owner, _ in self._kept)
                fullest = max(counts, key=lambda owner: (counts[owner], owner == principal))
                del self._kept[next(key for key in self._kept if key[0] == fullest)]


class Grammars:
    """The grammars of a model's vocabulary, built on demand and kept for a principal's requests with equal constraints.

    Args:
        tokenizer: the checkpoint's tokenizer; None if it has none.
        vocab_size: the number of tokens of the model's vocabulary.
        eos_token_ids: the tokens that end a sample.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._vocabulary: Vocabulary | None = None
        self._building = threading.Lock()  # guards the vocabulary
        self._kept = KeptGrammars()

    def compile(
        self,
        constraint: Constraint,
        principal: str = "",
        prompt: Sequence[int] = (),
        keep_special_tokens: bool = False,
    ) -> Grammar:
        """Returns a principal's grammar of a constraint; not for an event loop's thread: it takes milliseconds.

        The first call also builds the vocabulary, which takes half a second per 100,000 tokens.

        Args:
            principal: the grammar is kept for it alone.
            prompt: the tokens before the text, on whose end the bytes of the text's first token may depend.
            keep_special_tokens: whether texts show special tokens.

        Raises:
            MissingExtra: the grammar library is not installed.
            InvalidRequest: the constraint is malformed, impossible or too large, or there is no tokenizer.
        """
        if self._tokenizer is None:
            raise _wrong(constraint, "it needs text, and the checkpoint has no tokenizer.json")
        place = place_of(self._tokenizer, prompt, keep_special_tokens)
        name = constraint, place
        if (kept := self._kept.find(principal, name)) is not None:
            return kept
        try:
            num_bytes = len(constraint.text.encode())
        except UnicodeEncodeError as error:
            raise _wrong(constraint, "it contains a lone surrogate, which is not valid Unicode") from error
        if num_bytes > MAX_BYTES:
            raise InvalidRequest(
                f"{constraint.kind} has more than {MAX_BYTES} bytes; send a shorter one.", field=constraint.kind
            )
        with failing_as(lambda reason: _wrong(constraint, reason)):  # a panic, which handlers of calls let pass
            grammar = self._build(constraint, self._tokenizer, place)
        self._kept.add(principal, name, grammar)
        return grammar

    def _build(self, constraint: Constraint, tokenizer: Tokenizer, place: Place) -> Grammar:
        with self._building:  # the first thread that needs the vocabulary, or a part of it, builds it
            try:
                vocabulary = self._vocabulary or Vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)
                self._vocabulary = vocabulary
                first = vocabulary.first(place)
            except ImportError as error:
                raise MissingExtra(
                    f"{constraint.kind} needs the extra `structured` where the model is served: "
                    f"{install_line('structured')}.",
                    field=constraint.kind,
                ) from error
            except (ValueError, CheckpointError) as error:
                raise _wrong(constraint, f"the checkpoint's tokenizer cannot be used for it: {error}") from error
        inside = _matcher(constraint, vocabulary.inside)
        if first is None:
            self._check_beginning(constraint, inside)
            return Grammar(constraint, inside, self._vocab_size)
        state = _matcher(constraint, first.library)
        self._check_beginning(constraint, state)
        start = FirstState(state, first.spelled, vocabulary.special_ids)
        return Grammar(constraint, inside, self._vocab_size, start)

    def _check_beginning(self, constraint: Constraint, matcher: "LLMatcher") -> None:
        """Raises InvalidRequest if no token can begin a text, which also finds texts that can never be."""
        can_begin = mask_of(matcher, ceil_div(self._vocab_size, MASK_WORD)).any()
        why = first_line(matcher.get_error()) if matcher.is_error() else ""
        if why.startswith(NO_TOKEN) or not (can_begin or why):
            raise _wrong(constraint, "no text matches it that the model's tokens can spell")
        if why:
            raise _wrong(constraint, why)


def _matcher(constraint: Constraint, vocabulary: "LLTokenizer") -> "LLMatcher":
    """Returns the library's matcher before the first token.

    Raises:
        InvalidRequest: the constraint is malformed or too large.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_grammar_size=_GRAMMAR_SIZE,
        initial_lexer_fuel=_BUILD_FUEL,
        max_lexer_states=_LEXER_STATES,
        max_items_in_row=_ROW_ITEMS,
        step_lexer_fuel=_MASK_FUEL,
        step_max_items=_MASK_ITEMS,
        verbose_errors=False,
    )
    matcher = LLMatcher(vocabulary, _library_text(constraint), log_level=0, limits=limits)
    if matcher.is_error():
        raise _wrong(constraint, first_line(matcher.get_error()))
    return matcher


def _library_text(constraint: Constraint) -> str:
    """Returns a constraint as the grammar library reads it."""
    from llguidance import LLMatcher

    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.text)
    if constraint.kind == "grammar":
        return LLMatcher.grammar_from_lark(constraint.text)
    try:
        schema: Any = json.loads(constraint.text)
        if not isinstance(schema, dict):
            raise _wrong(constraint, f"a schema is a JSON object, not {type(schema).__name__}")
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)  # type: ignore[arg-type]  # a plain dict
    except (ValueError, RecursionError) as error:
        raise _wrong(constraint, f"it is not valid JSON: {error}") from error


def _wrong(constraint: Constraint, why: str) -> InvalidRequest:
    return InvalidRequest(f"{constraint.kind} cannot be used: {why}.", field=constraint.kind, given=constraint.text)
