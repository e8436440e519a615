"""``python -m trioleg``: the same as the console script ``trioleg``."""

from .cli import main

if __name__ == "__main__":
    main()
