"""Checkpoints that are whole or not there, and load at any number of ranks."""

from lockstep.checkpoint.load import load
from lockstep.checkpoint.save import save

__all__ = ["load", "save"]
