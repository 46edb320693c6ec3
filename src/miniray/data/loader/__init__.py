"""Batches, read and decoded ahead in threads under a byte budget."""
