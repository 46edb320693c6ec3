"""Parameter sync: after each interval, or asynchronously, with repair if workers are lost."""
