"""How many random examples are tried."""

from __future__ import annotations

from hypothesis import settings

# How many of a hundred, which is what Hypothesis tries by itself.
LONG, SHORT = 100, 20


def num_examples(count: int) -> int:
    """All ``count`` examples in ``make test-long``, and a fifth of them in ``make test``."""
    return count * settings.default.max_examples // 100
