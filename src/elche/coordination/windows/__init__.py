"""Decisions of the window policies, `cadence` and `async`."""
