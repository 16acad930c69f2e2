"""Package tk.v1: generation.proto and the code generated from it by `make proto`, which is never edited by hand."""
