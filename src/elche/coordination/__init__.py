"""Decisions about a run: batches, shares, windows and synchronisations.

Pure: events and ``now_s`` in, instructions out. No torch, socket, clock or thread.
"""
