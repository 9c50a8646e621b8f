"""Partitions and plans over unequal devices."""
