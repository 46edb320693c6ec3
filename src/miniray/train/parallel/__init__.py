"""Models split over workers: by layers (pipeline), within layers (tensor), and with replicas.

The schedules, the sharded tensors and the collectives are torch's. This package plans the split,
measures the layers, loads and sends batches, saves the model, and reports the cause of a failure.
"""
