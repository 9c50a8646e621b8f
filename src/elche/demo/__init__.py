"""Small real workloads that show elche before the hardware is there."""
