"""Starting ranks, watching them, and what is said when one of them dies or hangs."""
