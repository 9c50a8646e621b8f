"""Decisions of policy `sync`."""
