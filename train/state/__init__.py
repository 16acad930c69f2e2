"""Plain state of training, and the part of it that a checkpoint stores. No torch."""
