"""Forty-eight everyday features of PyTorch, plain and under each policy."""
