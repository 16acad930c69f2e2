"""What a conversation has beside its messages, for a chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

MARK: Final = "tk_generation"  # the function that a template's generation blocks call
# The variables of a template that a conversation's own variables cannot replace.
RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", MARK}
)


@dataclass(frozen=True)
class Context:
    """What a conversation has beside its messages.

    Attributes:
        tools: the definitions of tools; None = none were given, which templates distinguish from an empty list.
        documents: documents to answer from; None = none were given.
        variables: other variables of the template, by name, none of `RESERVED`. They replace special tokens.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """Returns everything as variables of a template."""
        return {**self.variables, "tools": self.tools, "documents": self.documents}


NO_CONTEXT: Final = Context()


@dataclass(frozen=True)
class PromptForm:
    """The form of the prompt that a conversation becomes.

    Attributes:
        continues: whether the answer continues the last message, which is the assistant's, instead of beginning a turn.
        variables: variables of the template, by name, none of `RESERVED`; JSON can hold their values.
    """

    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


NEW_TURN: Final = PromptForm()
