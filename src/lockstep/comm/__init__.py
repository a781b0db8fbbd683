"""Communication between ranks, always through a process group that is passed in.

The names are listed in ``__init__.pyi`` and are imported when first used: importing torch imports
``lockstep.comm.backends``, and is not to import more.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
