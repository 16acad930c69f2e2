"""A worker with a defect: its first step raises."""

import sys
from typing import Any

from tk.core.process import die_with_parent
from tk.infer.engine.worker.worker import work


class Broken:
    """A backend whose steps fail."""

    kernels, kv_bytes, samples = "broken", 0, True

    def step(self, *arguments: Any) -> Any:
        """Fails."""
        raise ZeroDivisionError("injected")

    sample_again = decode_ahead = logits = pack_adapter = drop_adapter = step


if __name__ == "__main__":
    die_with_parent()
    work(int(sys.argv[1]), lambda job: Broken())
