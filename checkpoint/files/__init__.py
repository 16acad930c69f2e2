"""Files and folders on disk: system calls, locks, links, and direct writes of large files."""
