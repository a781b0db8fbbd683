"""Run a program in float64, with ``lockstep.DataLoader`` in place of torch's.

python in_float64.py PROGRAM
"""

import runpy
import sys

import torch

import lockstep

torch.set_default_dtype(torch.float64)
torch.utils.data.DataLoader = lockstep.DataLoader  # type: ignore[misc]
runpy.run_path(sys.argv[1], run_name="__main__")
