"""A load test of a server: requests at a given rate or a given number at a time, and the latencies of their callers."""
