"""The `elche` command."""
