"""Goodput of contenders over a star of settings, measured together."""
