"""Steps that all ranks take, or none: a failure of one rank is an outcome of the step."""

from lockstep.guarding.blame import Blame
from lockstep.guarding.context import Guard
from lockstep.guarding.guard import guard
from lockstep.guarding.replicas import ReplicaDifference, check_replicas
from lockstep.guarding.step import GuardedStep

__all__ = ["Blame", "Guard", "GuardedStep", "ReplicaDifference", "check_replicas", "guard"]
