"""Processes of a run: launch, connection, exit."""
