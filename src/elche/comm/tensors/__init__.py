"""Helpers for sets of tensors."""
