"""Who am I, and who are the others? This is the only place that reads environment variables."""

from lockstep.world.environment import Placement, Starter, detect, rank_environment
from lockstep.world.world import World, init

__all__ = ["Placement", "Starter", "World", "detect", "init", "rank_environment"]
