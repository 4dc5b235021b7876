"""A config as it is told to others: trackers, checkpoints and files of responses have it without secrets.

    without_secrets(config)        # plain values, nested; no ray_kwargs, and *** where a secret may stand

Environment variables and passwords of a cluster are in `ray_kwargs`, which is left out. Elsewhere a secret can stand in
a URL, or under a name of the user's own, which is judged by its words: api_key, hf_token, Authorization.
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
"""The password before the host, or a token in its place; what is asked of a web page, which may be signed."""


def without_secrets(config: Section) -> dict[str, Any]:
    """Every section as plain values, as far as they may be shown."""
    found: dict[str, Any] = {}
    for key, value in flatten(config.model_dump(mode="json"), leaf_fields(type(config))).items():
        if not key.startswith("ray_kwargs"):
            put(found, key, _shown(value))
    return found


def _shown(value: Any, name: str = "") -> Any:
    """`name` is one of the user's own, which the schema does not know."""
    if isinstance(value, Mapping):
        return {inner: _shown(held, str(inner)) for inner, held in value.items()}
    if isinstance(value, list):
        return [_shown(held, name) for held in value]
    if not isinstance(value, str):
        return value
    if _NAME.search(name):
        return HIDDEN
    if "://" in value:
        for pattern, shown in _IN_URL:
            value = pattern.sub(shown, value)
    return value
