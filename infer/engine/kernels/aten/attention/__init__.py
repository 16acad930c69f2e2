"""The parts of paged attention: the plan that the host makes, and the merge of tiles of keys."""
