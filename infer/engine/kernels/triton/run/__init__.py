"""The steps of a rank: operations over rows, graphs of these, and the backend that runs them."""
