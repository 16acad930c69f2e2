"""Whether every layout gives the model of one process: layouts as data, a pool of ranks, a comparison, a report."""
