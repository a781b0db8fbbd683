from .launch import launch as launch
