"""Where an engine's ranks compute: on GPUs or on the CPU."""

import logging
from typing import Final

from ....core.cuda import count_gpus
from ....core.errors import ConfigError
from ..kernels.triton.reasons import why_not_on
from ..options import EngineOptions

_LOG: Final = logging.getLogger(__name__)


def on_gpus(options: EngineOptions) -> bool:
    """Returns whether the ranks compute on GPUs: torch's and Triton's kernels do, if each rank has one.

    "auto" takes them where Triton's kernels can run.
    """
    if options.kernels == "native" or count_gpus() < options.tp:
        return False
    return options.kernels != "auto" or not why_not_on(options.tp)


def check_kernels(options: EngineOptions) -> None:
    """Raises ConfigError if Triton's kernels are asked for and cannot run; says why "auto" does not take them."""
    reason = why_not_on(options.tp) if options.kernels in ("auto", "triton") else ""
    if reason and options.kernels == "triton":
        raise ConfigError(f"Triton's kernels cannot serve here: {reason}. Use --kernels auto or aten.")
    if reason and count_gpus() >= options.tp:
        _LOG.info("The GPUs are not used, because %s; --kernels aten uses them.", reason)
