"""The command line: thin commands over the rooms below. Importing this package loads nothing."""
