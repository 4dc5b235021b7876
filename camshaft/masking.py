"""Mask secrets in configs, in printed configs, and in the messages of user code.

    mask_value({"api_key": "hunter2", "url": "http://me:hunter2@host"})    # {"api_key": "***", "url": "http://me:***@host"}
    mask_yaml(text, keys_of_the_schema)                                    # the same for a printed config
    secrets = secret_values(os.environ, reward_kwargs)
    mask_text("HTTP 401 for key hunter2", secrets)                         # "HTTP 401 for key ***"

A secret is the value of a key with a name such as api_key, hf_token, client_secret, password or Authorization, or the
user info or a query value of a URL. The names of the config schema, such as `data.prompt_key`, are not secret.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

HIDDEN = "***"
MIN_LENGTH = 4
"""Shortest value that is masked inside a text. Shorter values would also match ordinary words."""

_SECRET_NAME = re.compile(r"(?i)secret|passw|credential|authorization|cookie|(?:^|[^a-z]|api)(?:key|token|auth|pwd)$")
_SECRETS_IN_URL = (
    re.compile(r"(?P<before>://[^/@:\s]*:)(?P<secret>[^/@\s]*)(?P<after>@)"),
    re.compile(r"(?P<before>https?://)(?P<secret>[^/@:\s]*)(?P<after>@)"),
    re.compile(r"(?P<before>[?&][\w.-]+=)(?P<secret>[^&\s]*)(?P<after>)"),
)
"""Patterns of secrets in a URL: a password or token before the host, and the values in the query string."""
_URL = re.compile(r"[\w+.:-]+://[^\s'\"]+")
_LINE = re.compile(r"(?P<indent>\s*(?:- )*['\"]?)(?P<name>[\w.+-]+)(?P<separator>: |:$|=)(?P<value>.*)")
"""A line of a printed config: a key with its value, or an override."""
_NAME = re.compile(r"(?P<name>[\w.+-]+)(?:: ?|=)")
"""The start of a pair inside a value, such as a mapping in an override."""
_PAIR_VALUE = re.compile(r"[^,{}\[\]]*")
_NO_SECRETS = ("true", "false", "none", "null")
_WORKING_DIRECTORY = "PWD"


def is_secret_name(name: str) -> bool:
    """Return True if a key with this name usually contains a secret."""
    return _SECRET_NAME.search(name) is not None


def mask_value(value: Any, name: str = "") -> Any:
    """Replace secrets in a nested value. `name` is the user-defined key of the value, or empty."""
    if isinstance(value, Mapping):
        return {key: mask_value(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [mask_value(item, name) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if is_secret_name(name) else mask_urls(value)


def mask_urls(text: str) -> str:
    """Replace passwords, tokens and query values in all URLs of a text."""
    return _URL.sub(lambda match: _mask_url(match[0]), text) if "://" in text else text


def _mask_url(url: str) -> str:
    for pattern in _SECRETS_IN_URL:
        url = pattern.sub(rf"\g<before>{HIDDEN}\g<after>", url)
    return url


def mask_yaml(text: str, public_names: Collection[str] = ()) -> str:
    """Replace secrets in a printed config, except values of keys whose last part is one of `public_names`."""
    lines: list[str] = []
    hidden_indent = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if hidden_indent is not None:
            if not line.strip() or indent > hidden_indent or line[indent:].startswith("- "):
                continue  # the rest of a secret that spans several lines
            hidden_indent = None
        match = _LINE.match(line)
        if match is None or not _is_hidden(match["name"], public_names):
            lines.append(_mask_pairs(mask_urls(line), public_names))
            continue
        hidden_indent = indent if match["separator"] != "=" else None
        separator = match["separator"] if match["separator"] != ":" else ": "
        lines.append(f"{match['indent']}{match['name']}{separator}{HIDDEN}")
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


def _is_hidden(name: str, public_names: Collection[str]) -> bool:
    return is_secret_name(name) and name.rpartition(".")[2] not in public_names


def _mask_pairs(line: str, public_names: Collection[str]) -> str:
    masked, end = "", 0
    for match in _NAME.finditer(line):
        if match.start() >= end and _is_hidden(match["name"], public_names):
            value = _PAIR_VALUE.match(line, match.end())
            assert value is not None
            masked, end = masked + line[end : match.end()] + HIDDEN, value.end()
    return masked + line[end:]


def secret_values(*sources: Mapping[str, Any], public_names: Collection[str] = ()) -> list[str]:
    """Return the secrets in configs or environment variables, the longest first."""
    found = {value for source in sources for value in _secrets_in(source, "", public_names)}
    secrets = [value for value in found if len(value) >= MIN_LENGTH and value.lower() not in _NO_SECRETS]
    return sorted(secrets, key=len, reverse=True)


def _secrets_in(value: Any, name: str, public_names: Collection[str]) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets_in(item, str(key), public_names)
    elif isinstance(value, list):
        for item in value:
            yield from _secrets_in(item, name, public_names)
    elif isinstance(value, str) and name != _WORKING_DIRECTORY and _is_hidden(name, public_names):
        yield value
    elif isinstance(value, str) and "://" in value:
        yield from (match["secret"] for pattern in _SECRETS_IN_URL for match in pattern.finditer(value))


def mask_text(text: str, secrets: Iterable[str]) -> str:
    """Replace all occurrences of `secrets`, and the secrets in URLs."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return mask_urls(text)
