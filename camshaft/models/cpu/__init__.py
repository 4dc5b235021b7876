"""Autograd nodes for CPUs: `attention.py` (packed attention) and `rms_norm.py`."""
