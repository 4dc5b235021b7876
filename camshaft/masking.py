"""Mask secrets, and escape control characters, in what a run writes: configs, arguments, logs and messages.

    mask_value({"api_key": "hunter2", "url": "http://me:hunter2@host"})    # {"api_key": "***", "url": "http://me:***@host"}
    mask_yaml("api_key: hunter2")                   # "api_key: ***", also for overrides
    remember_secrets(reward_kwargs)                 # in addition to those of the environment
    mask_text("HTTP 401 for key sk-hunter2")        # "HTTP 401 for key ***"
    printable("\x1b[2J sk-hunter2")                 # "\\x1b[2J ***", for a terminal or a log

Secrets are masked by name and by value. A secret is the value of a key or an environment variable with a name such as
api_key, GITHUB_PAT, client_secret, password or Authorization, or the user info or a query value of a URL. Names of
columns and of tokens, such as prompt_key and eos_token, are not those of secrets. In texts, known secrets of at least
`MIN_LENGTH` characters are replaced wherever they appear, except paths of files. Samples and metrics are never masked.
"""

import functools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"
MIN_LENGTH = 8
"""Shortest value that is masked inside a text. Shorter values would also match ordinary words and numbers."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|credential|authorization|cookie|bearer|webhook"
    r"|(?:^|_)(?:(?:api|auth|access|private)_?(?:key|token)s?|auth|pwd|dsn|jwt)(?:_\d+)?$"
)
_POSSIBLE_NAME = re.compile(r"(?:^|_)(?:key|token|pass|pat)(?:_\d+)?$")
"""Names of secrets, but also of other things. Their values are masked in texts only if they do not look like words."""
_WORKING_DIRECTORIES = ("PWD", "OLDPWD")
_PUBLIC_NAME = re.compile(
    r"(?:^|_)(?:prompt|response|message|chosen|rejected|margin|score|label|answer|question|image|video|audio|text|data"
    r"|source|column|id|fn|teacher|model|input|output|extra|info|tool|group|sort|cache|dict)s?_key$"
    r"|(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|stop|start|end|special|image|video|audio|think|per|max|min|num|first|last"
    r"|next|new)_token$"
)
"""Names of columns and of tokens of a vocabulary, which end as those of secrets."""
_SIGNED_QUERY = re.compile(r"(?i)^(?:sig|code)$|signature")
"""Names of query values of URLs that are secrets, in addition to those of `is_secret_name`."""
_SECRETS_IN_URL = (
    re.compile(r"(?P<before>://[^/@:\s]*:)(?P<secret>[^/\s]*)(?P<after>@)"),
    re.compile(r"(?P<before>https?://)(?P<secret>[^/@:\s]*)(?P<after>@)"),
    re.compile(r"(?P<before>[?&#](?P<name>[\w.-]+)=)(?P<secret>[^&#\s]*)(?P<after>)"),
)
"""Patterns of secrets in a URL: a password or token before the host, and the values in the query string."""
_URL = re.compile(r"[\w+.:-]+://[^\s'\"]+")
_LINE = re.compile(r"(?P<indent>\s*(?:- )*['\"]?)(?P<name>[\w.+-]+)(?P<separator>: |:$|=)(?P<value>.*)")
"""A line of a printed config: a key with its value, or an override."""
_NAME = re.compile(r"(?P<name>[\w.+-]+)['\"]?(?:: ?|=)")
"""The start of a pair inside a value, such as a mapping in an override."""
_END_OF_VALUE = re.compile(r"[,{}\[\]]")
_SCHEME = re.compile(r"(?:Bearer|Basic|Token) +(?=\S)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that change how a terminal shows the text around them, without line breaks and tabs."""

_remembered: set[str] = set()
"""Secrets of the configs of this process."""


# -- by name --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return True if a key or an environment variable with this name usually contains a secret."""
    words = _words(name)
    is_secret = (_SECRET_NAME.search(words) or _POSSIBLE_NAME.search(words)) and not _PUBLIC_NAME.search(words)
    return bool(is_secret) and name not in _WORKING_DIRECTORIES


def _words(name: str) -> str:
    return "_".join(_WORD.findall(name.rpartition(".")[2])).lower()


def _is_word(name: str, value: str) -> bool:
    """Return True if a name may be that of something else than a secret, and its value looks like a word or a tag."""
    return not _SECRET_NAME.search(_words(name)) and len(value) < 20 and not re.search(r"\d", value)


def mask_value(value: Any, name: str = "") -> Any:
    """Replace secrets in a nested value. `name` is the user-defined key of the value, or empty."""
    if isinstance(value, Mapping):
        return {key: mask_value(item, name if is_secret_name(name) else str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [mask_value(item, name) for item in value]
    if is_secret_name(name) and _is_secret(value):
        return HIDDEN
    return mask_text(value) if isinstance(value, str) else value


def _is_secret(value: Any) -> bool:
    """Return True for a value that can be a secret, and False for a short number, a switch or None."""
    return isinstance(value, str) or (isinstance(value, int) and len(str(value)) >= MIN_LENGTH)


def mask_yaml(text: str) -> str:
    """Replace secrets in a printed config or an override."""
    lines: list[str] = []
    hidden_indent = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if hidden_indent is not None:
            if not line.strip() or indent > hidden_indent or line[indent:].startswith("- "):
                continue  # the rest of a secret that spans several lines
            hidden_indent = None
        match = _LINE.match(line)
        if match is None or not is_secret_name(match["name"]):
            lines.append(_mask_pairs(mask_text(line)))
            continue
        hidden_indent = indent if match["separator"] != "=" else None
        separator = match["separator"] if match["separator"] != ":" else ": "
        lines.append(f"{match['indent']}{match['name']}{separator}{HIDDEN}")
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


def _mask_pairs(line: str) -> str:
    masked, end = "", 0
    for match in _NAME.finditer(line):
        if match.start() >= end and is_secret_name(match["name"]):
            masked += line[end : match.end()] + HIDDEN
            end = match.end() + _end_of_value(line[match.end() :])
    return masked + line[end:]


def _end_of_value(text: str) -> int:
    """Return the length of the value of a pair at the start of a text."""
    end = _END_OF_VALUE.search(text)
    return len(text) if end is None else end.start()


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Replace secrets in the arguments of a command."""
    return [mask_yaml(argument) for argument in arguments]


# -- by value -------------------------------------------------------------------------------------


def remember_secrets(*sources: Any) -> None:
    """Mask the secrets in these nested values in all later texts of this process. Read the environment again."""
    _remembered.update(secret_values(*sources))
    _known_secrets.cache_clear()


def remember_arguments(arguments: Sequence[str]) -> None:
    """Mask the secrets in the arguments of a command, which an error may quote before they are parsed."""
    pairs = [(match["name"], argument[match.end() :]) for argument in arguments for match in _NAME.finditer(argument)]
    remember_secrets(*({name: value[: _end_of_value(value)].strip("'\"")} for name, value in pairs))


def remembered_secrets() -> tuple[str, ...]:
    """Return the secrets of the configs of this process, for its worker processes, which inherit the environment."""
    return tuple(sorted(_remembered))


@functools.cache
def _known_secrets() -> tuple[str, ...]:
    """Return the secrets of the environment and of the configs, the longest first."""
    return tuple(sorted({*secret_values(os.environ), *_remembered}, key=len, reverse=True))


def secret_values(*sources: Any, min_length: int = MIN_LENGTH) -> set[str]:
    """Return the secrets in configs or environment variables, in all forms in which a text may contain them."""
    values = {value for source in sources for value in _secrets_in(source, "") if not _is_path(value)}
    forms = {form for value in values for form in _forms(value)}
    return {form for form in forms if len(form) >= min_length and not form.startswith("-----")}


def _secrets_in(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets_in(item, name if is_secret_name(name) else str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets_in(item, name)
    elif is_secret_name(name) and _is_secret(value):
        if not _is_word(name, str(value)):
            yield str(value)
    elif isinstance(value, str) and "://" in value:
        for match in (match for pattern in _SECRETS_IN_URL for match in pattern.finditer(value)):
            parameter = match.groupdict().get("name")
            if parameter is None or is_secret_name(parameter) or _SIGNED_QUERY.search(parameter):
                yield match["secret"]


def _is_path(value: str) -> bool:
    """Return True for a path, such as that of a file with credentials. The run may print it in messages."""
    path = os.path.expanduser(value)
    is_nested = len(Path(path).parts) > 2
    return value.startswith(("/", "~/", "./", "../")) and (
        os.path.exists(path) or (is_nested and os.path.isdir(os.path.dirname(path)))
    )


def _forms(value: str) -> Iterator[str]:
    """Yield the value as it is, its lines, and without the scheme of a header, each also as in a URL and in JSON."""
    parts = {value.strip(), *(line.strip() for line in value.splitlines())}
    for part in parts | {_SCHEME.sub("", part) for part in parts}:
        yield from (part, quote(part, safe=""), unquote(part), json.dumps(part)[1:-1])


def mask_text(text: str) -> str:
    """Replace all known secrets in a text, and the secrets in its URLs."""
    for secret in _known_secrets():
        if secret in text:  # faster than a pattern of all secrets
            text = text.replace(secret, HIDDEN)
    return mask_urls(text)


def mask_urls(text: str) -> str:
    """Replace passwords, tokens and query values in all URLs of a text."""
    return _URL.sub(lambda match: _mask_url(match[0]), text) if "://" in text else text


def _mask_url(url: str) -> str:
    for pattern in _SECRETS_IN_URL:
        url = pattern.sub(rf"\g<before>{HIDDEN}\g<after>", url)
    return url


def printable(text: str) -> str:
    """Mask the secrets of a text, and escape characters that a terminal would interpret."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], mask_text(text))


class PrintableFormatter(logging.Formatter):
    """Formatter of log records for a terminal or a file."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
