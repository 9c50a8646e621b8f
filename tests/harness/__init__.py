"""What the tests stand on: pools of ranks, leak checks, the layer checker."""
