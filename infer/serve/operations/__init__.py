"""The operation of a server: its states, its warm-up, and the change to new weights."""
