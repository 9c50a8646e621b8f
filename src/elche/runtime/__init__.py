"""Processes, devices and clocks: execution of the core's decisions."""
