"""The data of each worker: shards, loaders, plans, seeds, and positions inside an epoch."""
