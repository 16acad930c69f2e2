"""Starts ranks, watches them, and reports a rank that dies or hangs."""
