"""The optimizer's states, in the memory of the device or of the host, or on disk: one interface to all three."""
