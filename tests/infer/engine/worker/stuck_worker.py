"""A worker that never reads its socket."""

import signal

from tk.core.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    while True:
        signal.pause()
