"""Complete small programs, run by ``miniray demo``. Their readable twins are in ``examples/``."""
