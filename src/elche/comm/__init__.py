"""Moving bytes between ranks: the control channel, reductions and averaging."""
