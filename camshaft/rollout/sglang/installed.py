"""Which SGLang is installed: the versions that are known, and what to do about another one.

version = check_installed()            # or a sentence that says what to install; imports nothing
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging

from camshaft.errors import RolloutError

logger = logging.getLogger(__name__)

TESTED = ("0.5.23",)
"""Versions that the tests have run with, on a CPU. Others work as far as they kept what this folder calls."""

_told: set[str] = set()


def check_installed() -> str:
    """The version, or a sentence that says what to install. A version that nobody has tested is told once."""
    if importlib.util.find_spec("sglang") is None:
        raise RolloutError(
            f"rollout.name=sglang needs SGLang {TESTED[-1]}: pip install --no-deps sglang=={TESTED[-1]}, and what it "
            "imports, beside the torch that is there (it asks for a newer one); requirements-sglang.txt lists what "
            "the tests use. Or type rollout.name=torch, which is built in, or vllm"
        )
    version = importlib.metadata.version("sglang")
    if version not in TESTED and version not in _told:
        _told.add(version)
        logger.warning("%s", untested(version))
    return version


def untested(version: str) -> str:
    return (
        f"SGLang {version} is not one that this rollout was tested with: {', '.join(TESTED)}. "
        "If something is wrong, install one of those"
    )


def hint(version: str) -> str:
    """Goes behind an error: nothing for a known version."""
    return "" if version in TESTED else f"\n{untested(version)}"
