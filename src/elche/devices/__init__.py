"""Accelerators: the one room that knows their types and torch's functions for them."""
