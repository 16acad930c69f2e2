"""The records of a run: metrics, curves and traces."""
