"""A run's epochs on one rank, one after another: of steps, or of windows."""
