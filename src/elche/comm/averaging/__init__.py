"""Averages of parameters, and the outer step."""
