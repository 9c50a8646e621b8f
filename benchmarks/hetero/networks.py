"""Networks of two million parameters beside the demo's GPT.

A reduction costs what it costs elsewhere, while their compute stays well below the time
that an emulated device declares for a batch.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn


@final
class ResidualMLP(nn.Module):
    """Pre-norm residual perceptron: (samples, in_features) to (samples, classes)."""

    def __init__(
        self, in_features: int, classes: int, width: int = 512, depth: int = 9
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(in_features, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of samples."""
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


@final
class ConvNet(nn.Module):
    """Two convolutions with batch normalisation and a wide head.

    (samples, 1, side, side) to (samples, classes); `side` is a multiple of 4.
    """

    def __init__(
        self, side: int, classes: int, channels: int = 16, width: int = 1024
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(2 * channels * (side // 4) ** 2, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width // 2),
            nn.ReLU(),
            nn.Linear(width // 2, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        logits: Tensor = self.head(self.features(x))
        return logits
