"""Clients that nobody here wrote, against this package's server: `python -m tests.interop`, from the project's root."""
