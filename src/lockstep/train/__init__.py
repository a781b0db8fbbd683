"""Functions of a training step: means over the global batch, and averages of gradients."""

from lockstep.train.accumulate import accumulate
from lockstep.train.average import average_gradients
from lockstep.train.mean import mean

__all__ = ["accumulate", "average_gradients", "mean"]
