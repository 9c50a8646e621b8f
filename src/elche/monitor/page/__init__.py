"""Live page of a run: charts, server and the process that serves it."""
