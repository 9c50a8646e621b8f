"""One step of a pipeline."""
