"""Adapters for other frameworks' training loops; each module imports its own."""
