"""Reduction of gradients, in buckets and during backward."""
