"""Training labels: the token ids that a model should predict."""

from typing import Final

IGNORED: Final = -100  # the label of a position that the loss leaves out, as in torch's cross entropy
