"""Make torchvision's Python code importable where its compiled library cannot be loaded.

    PYTHONPATH=tests/support/torchvision_without_kernels python ...

Python runs this file at startup if its folder is on the path. On import, torchvision describes its compiled functions
to torch, which raises an error for missing functions. SGLang imports torchvision for images and calls none of them.
"""

from torch import library

_register = library.register_fake


def register_fake(op, func=None, /, **options):
    if isinstance(op, str) and op.startswith("torchvision::"):
        return (lambda same: same) if func is None else func
    return _register(op, func, **options)


library.register_fake = register_fake
