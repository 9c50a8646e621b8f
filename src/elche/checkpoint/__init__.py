"""Checkpoints on disk: nested state as JSON and tensors, folders, a writer."""
