"""Processes, devices and clocks: the shells that execute what the core decides."""
