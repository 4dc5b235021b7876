"""Kernels of Triton on the CPU: by its interpreter, which runs what a GPU would compute, or by its compiler alone."""

import os

import pytest


@pytest.fixture
def interpreted() -> None:
    """Triton asks for it where a kernel is defined, so it holds for a process: `make test-kernels`."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1, as `make test-kernels` does"
