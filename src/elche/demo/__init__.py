"""Small real workloads that demonstrate elche without special hardware."""
