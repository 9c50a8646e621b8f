"""Decisions about a run: who trains on what, and when ranks come together.

Pure: events and ``now_s`` in, instructions out. No torch, socket, clock or thread.
"""
