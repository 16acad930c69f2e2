"""The command line: thin commands over the other packages. Importing this package loads none of them."""
