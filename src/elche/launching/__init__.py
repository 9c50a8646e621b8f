"""A function run by every rank, from a script or a notebook."""
