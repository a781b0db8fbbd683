"""Start the ranks: N processes, the first failure wins, nobody is left behind.

``launch`` is imported when first used: the command line imports its neighbours, not it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
