"""API keys.

    keys = Keys.load(Path("served"), None)          # the server's own key, in a file that only this user can read
    keys.owner_of("tml-...")                        # "local", or None for a foreign key

A file with the keys of other users contains digests only: one `name digest` per line.
"""

import hashlib
import os
import re
import secrets
from pathlib import Path

from camshaft import storage
from camshaft.errors import ConfigError

PREFIX = "tml-"
"""Beginning of all keys; the SDK refuses others before it connects."""
OWN_FILE = "api-key"
OWN_NAME = "local"
_LINE = re.compile(r"([\w.@-]+) ([0-9a-f]{64})", re.ASCII)


class Keys:
    """Names of keys, by the digest of the key."""

    def __init__(self, names: dict[str, str], own_key: str | None = None):
        self._names, self.own_key = names, own_key

    @staticmethod
    def load(folder: Path, file: Path | None) -> "Keys":
        """Return the server's own key, which is created if it does not exist, and the keys of a file."""
        own_key = _own_key(folder)
        names = {} if file is None else read_file(file)
        return Keys({**names, digest(own_key): OWN_NAME}, own_key)

    def owner_of(self, key: str) -> str | None:
        """Return the name of a key; None if the key is unknown."""
        return self._names.get(digest(key))


def digest(key: str) -> str:
    """Return the digest under which a key is known. Keys are random, so it needs no salt."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    return f"{PREFIX}{secrets.token_urlsafe(24)}"


def add_key(file: Path, name: str) -> str:
    """Add a key to a file, and return it. It is not stored."""
    if not re.fullmatch(r"[\w.@-]+", name, re.ASCII) or name == OWN_NAME:
        raise ConfigError(f"new_key={name} is not a name for a key; use letters, digits, dots, @ and hyphens")
    names = read_file(file) if file.exists() else {}
    if name in names.values():
        raise ConfigError(f"{file} has a key with the name {name}; remove its line first, or use another name")
    key = new_key()
    lines = [f"{name} {known}" for known, name in {**names, digest(key): name}.items()]
    storage.write_text(file.absolute().parent, file.name, "\n".join(lines) + "\n")
    return key


def read_file(file: Path) -> dict[str, str]:
    """Return the names of the keys in a file, by digest."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"keys={file} cannot be read ({error}); camshaft serve new_key=NAME keys={file} creates it"
        ) from error
    names: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line.strip())
        if match is None or match[1] == OWN_NAME:
            raise ConfigError(f"{file}, line {number}: expected the name of a key and its SHA-256 digest")
        names[match[2]] = match[1]
    return names


def _own_key(folder: Path) -> str:
    """Return the key in the folder of the server. Raise ConfigError if others can read its file."""
    path = folder / OWN_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        facts = path.lstat()
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077 or path.is_symlink():
            raise ConfigError(f"{path} can be read by other users; delete it, and a new key is created") from None
        key = path.read_text(encoding="ascii").strip()
        if not key.startswith(PREFIX):
            raise ConfigError(f"{path} contains no key; delete it, and a new one is created") from None
        return key
    key = new_key()
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(f"{key}\n")
    return key
