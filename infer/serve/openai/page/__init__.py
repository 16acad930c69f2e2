"""The page at "/": the served model, its load, and a box to chat with it; files of its own, without a build step."""
