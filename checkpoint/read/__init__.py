"""Reading: finding a checkpoint, opening it, planning reads, and checking every byte."""
