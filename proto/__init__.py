"""The wire: protobuf schemas by version. Within a version things are only added."""
