"""Scalars, metrics and the timeline."""
