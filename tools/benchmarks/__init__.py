"""The suites of tools/benchmark.py: each a function from Options to Tables, its baselines beside it."""
