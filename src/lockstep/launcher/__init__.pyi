from .calling import launch as launch
