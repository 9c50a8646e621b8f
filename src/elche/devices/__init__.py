"""Accelerators: only this package names their types and torch's functions for them."""
