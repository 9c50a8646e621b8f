"""Cutting of a plain module into layers."""
