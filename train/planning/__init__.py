"""What a run will be, from its configuration alone: memory by part, bubble, traffic, problems. No torch."""
