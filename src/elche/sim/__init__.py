"""Simulation of runs: the real decisions under a virtual clock. Pure."""
