"""Compressed reductions with error feedback."""
