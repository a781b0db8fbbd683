"""Synchronous data parallelism for PyTorch: one model, many devices, the same step.

The public names are listed in ``__init__.pyi`` and are imported when first used, so that the
``lockstep`` command answers at once and can set the number of threads before torch is loaded.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
