"""Buckets of gradients, and one reduction of all of them per backward pass."""
