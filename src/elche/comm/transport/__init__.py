"""Process groups, shared memory, plain reductions and messages between two ranks."""
