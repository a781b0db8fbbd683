"""This rank among the others. Environment variables are read here, and nowhere else.

The names are listed in ``__init__.pyi`` and imported when first used: the launcher reads the
environment before torch is loaded.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
