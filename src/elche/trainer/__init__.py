"""What `Trainer` does: its loop, evaluation, its handle, and when it stops."""
