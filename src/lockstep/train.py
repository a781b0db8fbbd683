"""Functions of a training step: means over the global batch, and averages of gradients."""

from lockstep.nn import accumulate, average_gradients, mean

__all__ = ["accumulate", "average_gradients", "mean"]
