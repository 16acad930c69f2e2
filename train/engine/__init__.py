"""One rank's training engine: stages, passes, loss, loss scale, non-finite policy, learning rate, compilation."""
