"""Which rank gets which rows: pure arithmetic without I/O, pyarrow or threads."""
