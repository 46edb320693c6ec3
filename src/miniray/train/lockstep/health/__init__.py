"""What the driver knows of its ranks: heartbeats, hangs, and the root cause of a failure."""
