"""The open files that a server needs for the limits it is asked for, beside those that the system lets it have."""

import logging
import resource
from typing import Final

from ....core.errors import ConfigError

MAX_CONNECTIONS: Final = 2048  # of a port
_OWN: Final = 96  # the log, libraries, ports, the template's process, and connections that are taken only to be refused
_OF_RANK: Final = 8  # a worker's, and those of the one that is loaded beside it
_LOG: Final = logging.getLogger(__name__)


def connections_per_port(ports: int, callers: int, tp: int) -> int:
    """Returns the most connections of each port, so that the descriptors do not run out; logs if these are few.

    The limit of this process's open files is raised as far as it may, until every port could have the most connections
    that a port takes; with few, every caller should at least have a connection to every port.

    Args:
        ports: the number of the server's ports.
        callers: the number of requests that it takes at a time, each of which may come by a connection of its own.
        tp: the number of its workers.

    Raises:
        ConfigError: no port could have a connection.
    """
    own = _OWN + _OF_RANK * tp
    needed = own + ports * min(callers, MAX_CONNECTIONS)
    limit = raised_limit(own + ports * MAX_CONNECTIONS)
    room = (limit - own) // ports
    if room < 1:
        raise ConfigError(
            f"This process may have {limit} open files (ulimit -n), and the server needs {own + ports} to take one "
            f"connection on each port. Allow {needed}, for the callers that its limits ask for."
        )
    if limit < needed:
        _LOG.warning(
            "%d open files (ulimit -n) are few: each of %d ports takes at most %d connections, and max_running and "
            "max_queued allow %d callers; allow %d open files, or lower max_queued",
            *(limit, ports, room, callers, needed),
        )
    return min(room, MAX_CONNECTIONS)


def raised_limit(wanted: int) -> int:
    """Raises the limit of this process's open files as far as it may and as is wanted; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted if soft == resource.RLIM_INFINITY else soft
    raised = wanted if hard == resource.RLIM_INFINITY else max(soft, min(hard, wanted))
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised
