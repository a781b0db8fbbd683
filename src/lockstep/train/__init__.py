"""Functions of a training step: means over the global batch, and averages of gradients."""

from lockstep.nn import accumulate, mean
from lockstep.train.average import average_gradients

__all__ = ["accumulate", "average_gradients", "mean"]
