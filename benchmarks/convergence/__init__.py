"""What methods of data parallelism cost in samples, measured on virtual ranks."""
