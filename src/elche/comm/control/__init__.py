"""The control channel between a rank and the coordinator."""
