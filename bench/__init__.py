"""Benchmarks, one command a table."""
