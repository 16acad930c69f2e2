"""What a request asks for and what it gets: sampling parameters, events, completions."""
