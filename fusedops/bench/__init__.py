"""Benchmarks: ``python -m fusedops.bench host``."""
