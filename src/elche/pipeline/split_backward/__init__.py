"""Backward passes in two parts."""
