"""Watchers of the user's loop."""
