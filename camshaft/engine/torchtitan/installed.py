"""Checks that torchtitan is installed, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging

from camshaft.errors import EngineError

logger = logging.getLogger(__name__)

TESTED = "0.3.0"
"""Version that the tests cover. torchtitan changes its API between versions."""

REQUIRED = ("torchtitan", "triton", "tyro", "spmd_types")
"""Modules that the engine imports, directly or through torchtitan."""


def check_installed() -> None:
    """Raise an error with install instructions if a module is missing; warn about an untested version."""
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineError(
            f"strategy=torchtitan requires {', '.join(missing)}, which is not installed; run pip install triton tyro "
            f"spmd_types==0.2.3 and pip install --no-deps torchtitan=={TESTED}, or set strategy=fsdp"
        )
    version = importlib.metadata.version("torchtitan")
    if version != TESTED:
        logger.warning(
            "torchtitan %s is not a tested version; if you see errors, install torchtitan==%s", version, TESTED
        )
