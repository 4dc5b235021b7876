"""Removal of secrets from a config before it is written to trackers, checkpoints and response files.

    without_secrets(config)        # nested plain values; no ray_kwargs, and *** in place of possible secrets

`ray_kwargs` can contain environment variables and cluster passwords and is omitted. Elsewhere a secret can be part of
a URL, or the value of a user-defined key; such keys are recognized by name (api_key, hf_token, Authorization).
"""

import re
from collections.abc import Mapping
from typing import Any

from camshaft.config.schema.fields import Section
from camshaft.config.tree import flatten, leaf_fields, put

HIDDEN = "***"

_NAME = re.compile(r"(?i)secret|passw|credential|authorization|cookie|(?:^|[^a-z]|api)(?:key|token|auth|pwd)$")
_IN_URL = (
    (re.compile(r"(://[^/@:\s]*):[^/@\s]*@"), rf"\1:{HIDDEN}@"),
    (re.compile(r"(https?://)[^/@:\s]*@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?<=[?&])([\w.-]+)=[^&\s]*"), rf"\1={HIDDEN}"),
)
"""Patterns of secrets in a URL: a password or token before the host, and query values, which can be signatures."""


def without_secrets(config: Section) -> dict[str, Any]:
    """Return the config as nested plain values without secrets."""
    values: dict[str, Any] = {}
    for key, value in flatten(config.model_dump(mode="json"), leaf_fields(type(config))).items():
        if not key.startswith("ray_kwargs"):
            put(values, key, _redact(value))
    return values


def _redact(value: Any, name: str = "") -> Any:
    """Redact a value; `name` is its user-defined key, which is not part of the schema."""
    if isinstance(value, Mapping):
        return {key: _redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_redact(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if _NAME.search(name):
        return HIDDEN
    if "://" in value:
        for pattern, replacement in _IN_URL:
            value = pattern.sub(replacement, value)
    return value
