"""Lets torchvision's Python be imported where its compiled part cannot load, wherever this folder is on the path.

    PYTHONPATH=tests/support/torchvision_without_kernels python ...

Python runs this file when it starts. torchvision describes its compiled functions to torch while it is imported, and
torch refuses that for functions that are not there; nobody calls them. SGLang imports torchvision for images.
"""

from torch import library

_register = library.register_fake


def register_fake(op, func=None, /, **options):
    if isinstance(op, str) and op.startswith("torchvision::"):
        return (lambda same: same) if func is None else func
    return _register(op, func, **options)


library.register_fake = register_fake
