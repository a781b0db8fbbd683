"""Gives each Python in whose PYTHONPATH this folder is the simulated devices, with its torch."""

import ctypes
import importlib.util
import os
import sys


class _Torchs:
    """Finds torch, and loads the devices before it and what it is to know of them after it."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _load_around(execute, module)
        return spec


def _load_around(execute, module):
    # The library is built once for all places of torch, so that it doesn't know this one.
    ctypes.CDLL(os.path.join(os.path.dirname(module.__file__), "lib", "libtorch_python.so"))
    # Torch's own hooks of CUDA are looked for while it is imported, and only once.
    spec = importlib.util.spec_from_file_location("_simulated", os.environ["SIM_LIBRARY"])
    devices = sys.modules["_simulated"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(devices)
    execute(module)
    disguise = os.environ["SIM_DISGUISE"]
    importlib.import_module(f"tests.simulated.{disguise}").install()


if "SIM_LIBRARY" in os.environ:
    sys.meta_path.insert(0, _Torchs())
