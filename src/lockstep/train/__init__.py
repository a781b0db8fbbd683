"""What a training step is made of, beside forward and backward."""

from lockstep.train.accumulate import accumulate
from lockstep.train.average import average_gradients
from lockstep.train.mean import mean

__all__ = ["accumulate", "average_gradients", "mean"]
