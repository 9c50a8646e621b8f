"""A rank's work at the ends of steps and windows."""
