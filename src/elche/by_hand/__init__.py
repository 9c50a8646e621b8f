"""Replicas that the user's loop reduces by hand."""
