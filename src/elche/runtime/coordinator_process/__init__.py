"""The coordinator as a child of the launcher, which starts it anew when it dies."""
