"""Simulation of runs: the real decision code under a virtual clock. Pure."""
