"""The gRPC server around an engine: calls, statuses, streams, health, reflection and shutdown."""
