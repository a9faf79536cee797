"""Every door of the library, tried with malformed input: `python -m tests.doors` prints the table."""
