"""The wire: protobuf schemas by version. See WIRE.md of the design for what may change in a version (only additions)."""
