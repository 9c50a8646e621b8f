"""Buffers of a model, known and averaged."""
