"""Benchmarks that a user can run: ``lockstep bench``."""

from lockstep.bench.command import collectives

__all__ = ["collectives"]
