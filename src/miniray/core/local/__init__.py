"""The local engine: processes of this machine and shared memory.

It begins in ``spawner``; ``driver`` is the part for the process that starts it, workers begin in
``worker``. Nothing is imported here, so that neither loads what only the other needs.
"""
