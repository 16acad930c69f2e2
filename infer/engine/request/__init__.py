"""The content of requests and of their answers: sampling parameters, events, completions."""
