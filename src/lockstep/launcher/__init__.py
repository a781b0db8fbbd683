"""Start the ranks: N processes, the first failure wins, nobody is left behind.

The names are listed in ``__init__.pyi`` and imported when first used: the command line must not
import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
