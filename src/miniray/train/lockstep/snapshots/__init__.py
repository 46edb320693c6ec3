"""The state from which ranks restart: in the driver's memory, and in memory shared with ranks."""
