"""The services over gRPC: bytes become requests, and events become bytes."""
