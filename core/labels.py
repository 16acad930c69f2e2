"""Training labels: the token ids that a model should give."""

from typing import Final

IGNORED: Final = -100  # the label of a position that does not count in the loss, as in torch's cross entropy
