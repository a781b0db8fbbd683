"""Optimizers whose work and state are divided among the ranks.

The names are listed in ``__init__.pyi`` and are imported when first used: torch's
ZeroRedundancyOptimizer, which ours is a subclass of, takes a while to import.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
