"""A run over several hosts: a launcher on each, and the first one leads."""
