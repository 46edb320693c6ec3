"""Tools for data files: describe what reading them costs, and rewrite them."""
