"""The sharded engine on PyTorch's FSDP: start at `engine.py`, which has the map of this folder."""

from camshaft.engine.fsdp.engine import FSDPEngine
from camshaft.engine.fsdp.fsdp1 import FSDP1Engine

__all__ = ["FSDP1Engine", "FSDPEngine"]
