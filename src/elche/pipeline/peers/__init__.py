"""Messages between the ranks of a pipeline."""
