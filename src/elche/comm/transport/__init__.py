"""Process groups, shared memory and plain reductions."""
