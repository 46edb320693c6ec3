"""Models split over workers: by layers (pipeline), inside of layers (tensor), and with copies.

The schedules, the sharded tensors and the collectives are torch's. What is here says what goes
where, measures it, feeds it, saves it, and finds the cause when it fails.
"""
