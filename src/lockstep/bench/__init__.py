"""Benchmarks that a user can run: ``lockstep bench``."""
