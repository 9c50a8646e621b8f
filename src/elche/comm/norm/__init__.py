"""Batch normalisation over all ranks."""
