"""Checkpoints that are whole or not there, and load at any number of ranks.

The names are listed in ``__init__.pyi`` and are imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
