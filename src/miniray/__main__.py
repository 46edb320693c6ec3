"""``python -m miniray`` is ``miniray``."""

from miniray.cli import main

if __name__ == "__main__":
    main()
