"""What apcore-mcp costs, beside what it is built on: `python -m tests.benchmarks`, from the project's root."""
