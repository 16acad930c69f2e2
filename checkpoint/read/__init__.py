"""Reading: finds a checkpoint, opens it, plans the reads, and checks every byte."""
