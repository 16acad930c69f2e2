"""Files and folders on disk: every call to the system, locks, links and how large runs of bytes are written."""
