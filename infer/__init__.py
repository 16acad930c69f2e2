"""Inference: engine, workers, Python API, gRPC server and client."""
