"""The format itself: manifest, parts, chunks, regions and safetensors headers, as plain data."""
