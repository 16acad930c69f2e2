"""Objects that work only in the process that made them: a fork has neither their threads nor connections of its own."""

import os
from typing import NoReturn

from .errors import ConfigError


class HomeProcess:
    """The process that made an object, which keeps this as its first attribute: then it cannot be pickled or copied.

    Args:
        subject: the object, as the subject of a sentence.
    """

    __slots__ = ("_process_id", "_subject")

    def __init__(self, subject: str) -> None:
        self._subject, self._process_id = subject, os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process is the one that made the object."""
        return os.getpid() == self._process_id

    def require(self) -> None:
        """Raises ConfigError in every other process, where a call would wait for ever or disturb the first one."""
        if not self.is_here:
            raise ConfigError(
                f"{self._subject} was made in process {self._process_id} and is used in process {os.getpid()}, a fork "
                "of it, which has none of its threads and connections. Make a new one in the process that uses it."
            )

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"{self._subject} cannot be copied or sent to another process: its threads and connections exist only in "
            f"process {self._process_id}. Make a new one in the process that uses it."
        )
