"""Accelerators: the only room with their types and torch's functions for them."""
