"""Benchmarks that a user can run: ``lockstep bench``."""

from lockstep.bench.command import collectives
from lockstep.bench.plan import DEFAULT_SIZES

__all__ = ["DEFAULT_SIZES", "collectives"]
