"""Assembly of a pipeline from layers, costs and ranks."""
