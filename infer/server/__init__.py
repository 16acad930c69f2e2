"""The gRPC server around an engine: the wire, its statuses, streams, health, reflection, and the way down."""
