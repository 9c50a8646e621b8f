"""Data parallelism over pipelines."""
