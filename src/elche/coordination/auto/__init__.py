"""Decisions of policy `auto`."""
