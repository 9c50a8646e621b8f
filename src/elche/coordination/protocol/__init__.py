"""Messages between ranks and the coordinator."""
