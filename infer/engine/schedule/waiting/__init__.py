"""Requests before they run: their admission, and the queue with its priorities and fair shares."""
