"""Checkpoints of pipelines: each rank its own stages, resumed under any partition."""
