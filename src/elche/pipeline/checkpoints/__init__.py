"""Checkpoints of pipelines: each rank saves its stages; any partition can resume."""
