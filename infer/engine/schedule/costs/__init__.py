"""Costs as running steps show them: of a step's tokens, of its rows, of proposals; and the room of one step."""
