"""Pipeline execution: stages, split backward, messages, and the guard over them."""
