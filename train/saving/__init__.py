"""Training state to and from the run folder: snapshots, background saves, replicas compared, resuming."""
