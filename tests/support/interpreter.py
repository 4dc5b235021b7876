"""A fix of Triton's interpreter, which stores bfloat16 as integers and multiplies the bits in `tl.dot`.

with fixed_dot(): ...        # requires Triton
"""

from typing import Any
from unittest import mock


def fixed_dot() -> Any:
    """Return a patch, as a context manager, that multiplies bfloat16 operands as numbers."""
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def numbers(handle: Any) -> Any:
        if not handle.dtype.scalar.is_bf16():
            return handle
        bits = handle.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), interpreter.tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, numbers(a), numbers(b), *rest)

    return mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot)
