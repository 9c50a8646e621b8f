"""The `Trainer`: its loop, evaluation, its handle, and its end."""
