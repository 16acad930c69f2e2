"""New weights without a restart: the switch between engines, and the watch over a run's newer steps."""
