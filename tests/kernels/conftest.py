"""Triton kernels on the CPU, run by the interpreter, which executes the GPU code, or only compiled."""

import os

import pytest


@pytest.fixture
def interpreted() -> None:
    """Enable the interpreter. Triton reads the setting when a kernel is defined, so it applies to the whole process."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1, as `make test-kernels` does"
