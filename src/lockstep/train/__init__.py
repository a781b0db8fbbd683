"""What a training loop says besides the model: exact numbers."""

from lockstep.train.average import average_gradients

__all__ = ["average_gradients"]
