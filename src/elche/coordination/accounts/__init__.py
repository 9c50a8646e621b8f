"""Accounts of batches, samples and metrics."""
