"""Context parallelism: the positions of a row are dealt over ranks, and attention gets the keys of other ranks."""
