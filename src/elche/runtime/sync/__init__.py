"""Steps of ``sync`` on one rank."""
