"""The run of this process: `elche.setup` and the calls of a user's loop."""
