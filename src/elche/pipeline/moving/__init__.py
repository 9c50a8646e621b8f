"""Layers that move between ranks."""
