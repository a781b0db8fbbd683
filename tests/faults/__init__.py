"""Faults by script in real runs that restart: what each must end in, made by the hundred.

``python -m tests.faults`` makes many; ``test_faults.py`` a chosen few.
"""
