"""The coordinator as a child of the launcher, restarted when it dies."""
