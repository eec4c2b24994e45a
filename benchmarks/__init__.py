"""Benchmarks: one script per public claim; results are appended to results.csv."""
