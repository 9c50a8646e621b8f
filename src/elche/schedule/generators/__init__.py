"""Generators of schedules."""
