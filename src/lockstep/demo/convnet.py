"""The classic small convolutional network for handwritten digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """Two convolutions and two linear layers: 21,840 parameters, ten classes.

    Args:
        dropout: The probability with which the features of the second convolution, and the
            hidden units, are dropped. Ranks draw at random each for itself, so with 0 alone
            do several ranks compute just what one process does on the whole batch.

    Source:
        ``Net`` of PyTorch's MNIST example and of the tutorial "Writing Distributed Applications
        with PyTorch"; the parameters have the same names and shapes.
    """

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(320, 50)
        self.fc1_drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probabilities of the classes.

        Args:
            images: ``[N, 1, 28, 28]``, float.

        Returns:
            ``[N, 10]``, for ``nll_loss``.
        """
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = self.fc1_drop(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)
