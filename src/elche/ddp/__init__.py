"""A DistributedDataParallel for unequal ranks."""
