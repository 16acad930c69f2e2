"""The engine: requests become tokens in worker processes. It knows no protocol."""
