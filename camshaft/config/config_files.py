"""Read config files and the files in their defaults lists.

    ConfigFiles([Path("conf")], {"ppo_trainer": {}}).contents("mine", [])

A file can list other files under `defaults`, with which it is merged in this order. `_self_` stands for the file
itself, and is the last entry if it is missing:

    defaults:
      - ppo_trainer                 # the built-in defaults
      - base                        # base.yaml in the same folder
      - model: small                # model/small.yaml; its keys are in the section `model`
      - optional data@train: own    # data/own.yaml, if it exists; its keys are in the section `train`
      - override /reward: exact     # replaces the option of the group `reward` in another file
      - _self_

A group is a folder. The keys of its files are in the section with the name of the folder, unless the entry names a
package (`group@section`), or the first line of the file is `# @package section`. `_global_` is the whole config. The
entries have the meaning that they have in Hydra.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from camshaft.config.foreign.topics import topic_of_key
from camshaft.config.guards import is_list, is_mapping
from camshaft.config.tree import nearest_keys
from camshaft.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MAX_VALUES = 100_000
"""Maximum number of values in a config file."""

_INVALID_VALUES = (ValueError, LookupError, TypeError, AttributeError)
"""Exceptions of PyYAML for a value that does not fit its tag, such as `!!int x`."""
_ENTRY = re.compile(r"(?P<keywords>(?:(?:optional|override) +)*)(?P<path>[^@]+)(?:@(?P<package>.*))?")
_PACKAGE = re.compile(r"\s*#\s*@package +(\S+)")


class Entry(NamedTuple):
    """An entry of a defaults list."""

    group: str
    """Group of the file. A group that starts with / is relative to the folder of all files."""
    option: str | list[str] | None
    """Name of the file, or names of several files. None: no file."""
    package: str | None = None
    is_choice: bool = False
    """The option can be overridden."""
    is_optional: bool = False
    is_override: bool = False


SELF = Entry("", "_self_")


class ConfigFile(NamedTuple):
    """Contents of a config file."""

    entries: list[Entry]
    content: dict[str, Any]
    package: str | None = None
    """Package in the header of the file."""


class ConfigFiles:
    """Config files in folders. The first folder that contains a file wins, and all of them win over the defaults."""

    def __init__(self, folders: Sequence[Path], built_in: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._folders = list(folders)
        self._built_in = built_in or {}
        """Contents of the files that are not in a folder."""
        self._options: dict[str, str | list[str] | None] = {}
        """Options of groups that overrides choose."""
        self._deleted: dict[str, str | None] = {}
        """Groups that overrides delete, or the option with which they are deleted."""
        self._used: dict[str, str | list[str] | None] = {}
        """Options of the groups in the defaults lists."""

    def has_group(self, group: str) -> bool:
        """Return True if a group has a folder."""
        return any((folder / group).is_dir() for folder in self._folders)

    def options(self, group: str) -> list[str]:
        """Return the names of the files in a group."""
        return sorted({file.stem for folder in self._folders for file in (folder / group).glob("*.yaml")})

    def contents(self, name: str, groups: Sequence["Override"]) -> Iterator[dict[str, Any]]:
        """Yield the contents of a file and of those in its defaults list, in the order in which they are merged.

        Keys of files in packages are dotted. `groups` are the overrides of groups.
        """
        name = name.removesuffix(".yaml")
        appended: list[Entry] = []
        for override in groups:
            key, value = override.get_key_element().lstrip("+~"), override.value()
            if override.is_delete():
                self._deleted[key] = None if value is None else str(value)
            elif override.is_add():
                appended.append(Entry(f"/{override.key_or_group}", _as_option(value), override.package, is_choice=True))
            else:
                self._options[key] = _as_option(value)
        parts = self._expand(name, "", appended, ())
        for key in (*self._options, *self._deleted):
            if key not in self._used:
                raise _error(
                    f"Could not override '{key}'. No match in the defaults list. To append, write +{key}=NAME."
                )
        for package, content in parts:
            prefix = f"{package}." if package else ""
            yield {f"{prefix}{key}": value for key, value in content.items() if key != "hydra"}

    def _expand(
        self, name: str, package: str, appended: Sequence[Entry], parents: tuple[str, ...]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the contents of a file and of those in its defaults list, with their packages."""
        if name in parents:
            raise _error(f"{name}.yaml is in its own defaults list")
        file = self._read(name, parents)
        if not parents:
            self.add_search_path(file.content.get("hydra"))
        entries = file.entries if SELF in file.entries else [*file.entries, SELF]
        entries = [*entries, *appended]
        group = name.rpartition("/")[0]
        for entry in entries:
            if entry.is_override:
                self._options.setdefault(_choice_key(entry, group, package), entry.option)
        # Later entries come first, so that they can override the options of earlier ones. Options that refer to others
        # come last.
        parts: dict[int, list[tuple[str, dict[str, Any]]]] = {}
        for index in sorted(range(len(entries)), key=lambda index: ("${" in str(entries[index].option), -index)):
            if entries[index] == SELF:
                parts[index] = [(package, file.content)]
            elif not entries[index].is_override:
                parts[index] = self._expand_entry(entries[index], group, package, (*parents, name))
        return [part for index in sorted(parts) for part in parts[index]]

    def _expand_entry(
        self, entry: Entry, parent_group: str, parent_package: str, parents: tuple[str, ...]
    ) -> list[tuple[str, dict[str, Any]]]:
        group, option = _join(parent_group, entry.group), entry.option
        if entry.is_choice:
            key = _choice_key(entry, parent_group, parent_package)
            option = self._used[key] = self._options.get(key, option)
            if key in self._deleted and self._deleted[key] in (None, option):
                return []
        parts: list[tuple[str, dict[str, Any]]] = []
        for name in [option] if isinstance(option, str) else option or []:
            name = self._resolve(name)
            path = f"{group}/{name}".lstrip("/")
            if name == "???":
                options = "\n\t".join(self.options(group))
                raise _error(f"You must specify '{group}', e.g, {group}=<OPTION>\nAvailable options:\n\t{options}")
            if (path in self._built_in or entry.is_optional) and self._find(path) is None:
                continue
            header = self._read(path, parents).package
            package = _child_package(entry, group, parent_package, header)
            parts += self._expand(path, package, (), parents)
        return parts

    def _resolve(self, option: str) -> str:
        """Replace references to the options of groups, such as `${model}`."""

        def used(match: re.Match[str]) -> str:
            if not isinstance(self._used.get(match[1]), str):
                raise _error(f"Error resolving interpolation '{option}': no group {match[1]} with one option")
            return str(self._used[match[1]])

        return re.sub(r"\$\{([^{}]*)\}", used, option)

    # -- files ------------------------------------------------------------------------------------

    def add_search_path(self, hydra: Any) -> None:
        """Add the folders of `searchpath` in the section `hydra`."""
        folders = hydra.get("searchpath") if is_mapping(hydra) else None
        for folder in [folders] if isinstance(folders, str) else folders or []:
            if str(folder).startswith("pkg://"):
                topic = topic_of_key(str(folder).removeprefix("pkg://"))
                reason = "must be a folder. Write file://FOLDER." if topic is None else topic.message()
                raise ConfigError(f"hydra.searchpath={folder}: {reason}")
            self._folders.append(Path(str(folder).removeprefix("file://")).expanduser())

    def _find(self, name: str) -> Path | None:
        try:
            return next((file for folder in self._folders if (file := folder / f"{name}.yaml").is_file()), None)
        except (OSError, ValueError):  # a name that no file can have
            return None

    def _read(self, name: str, parents: tuple[str, ...]) -> ConfigFile:
        path = self._find(name)
        if path is None and name in self._built_in:
            return ConfigFile([], dict(self._built_in[name]))
        if path is None:
            raise ConfigError(self._missing(name, parents))
        return read_config_file(path)

    def _missing(self, name: str, parents: tuple[str, ...]) -> str:
        if not self._folders:
            return f"camshaft has no config file {name}.yaml; to use your own, set --config-dir to its folder"
        options = self.options(name.rpartition("/")[0])
        near = nearest_keys(name.rpartition("/")[2], options, limit=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return (
            f"no config file {name}.yaml in {', '.join(map(str, self._folders))} (--config-dir).{hint} "
            f"Config files there: {', '.join(options) or 'none'}"
        )


def read_config_file(path: Path) -> ConfigFile:
    """Read a config file."""
    try:
        text = path.read_text("utf-8")
        if "&" in text and "*" in text and _num_values(yaml.SafeLoader(text).get_single_node(), {}) > MAX_VALUES:
            raise ConfigError(
                f"{path}: its aliases (*name) stand for more than {MAX_VALUES} values; write fewer aliases"
            )
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, yaml.YAMLError, OmegaConfBaseException, RecursionError, *_INVALID_VALUES) as error:
        raise _error(f"{path}: {error}") from error
    if not is_mapping(content):
        raise _error(f"{path}: must contain keys with values")
    entries: Any = content.get("defaults") or []
    if not is_list(entries):
        raise _error(f"{path}: defaults must be a list")
    package = _PACKAGE.match(text)
    return ConfigFile(
        [_parse_entry(entry, path) for entry in entries],
        {str(key): value for key, value in content.items() if key != "defaults"},
        None if package is None else package[1],
    )


def _num_values(node: yaml.Node | None, counts: dict[int, float]) -> float:
    """Return the number of values below a node with all aliases replaced; infinity if it contains itself."""
    if id(node) not in counts:
        counts[id(node)] = math.inf
        children: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        counts[id(node)] = 1 + sum(_num_values(child, counts) for child in children)
    return counts[id(node)]


# -- entries of a defaults list -------------------------------------------------------------------


def _parse_entry(entry: Any, path: Path) -> Entry:
    if entry == "_self_":
        return SELF
    (key, option), *others = entry.items() if is_mapping(entry) and entry else [(entry, None)]
    match = _ENTRY.fullmatch(key) if isinstance(key, str) and not others else None
    if match is None or not isinstance(option, str | list | None):
        raise _error(f"{path}: the entry {entry} of defaults must be NAME or GROUP: NAME")
    if not is_mapping(entry):
        group, slash, name = match["path"].rpartition("/")
        return Entry(group or slash, name, match["package"])
    return Entry(
        match["path"],
        _as_option(option),
        match["package"],
        is_choice=True,
        is_optional="optional" in match["keywords"],
        is_override="override" in match["keywords"],
    )


def _as_option(value: Any) -> str | list[str] | None:
    if is_list(value):
        return [str(item) for item in value]
    return None if value is None else str(value)


def _join(parent_group: str, group: str) -> str:
    """Return the path of a group, which is relative to the group of the file that names it."""
    return group[1:] if group.startswith("/") else "/".join(filter(None, (parent_group, group)))


def _child_package(entry: Entry, group: str, parent_package: str, header: str | None) -> str:
    """Return the package of a file in a defaults list. Packages of entries are relative, those of headers are not."""
    package = entry.package
    if package is None and header is not None:
        package = f"_global_.{header}"
    elif package is None:
        package = entry.group.strip("/").replace("/", ".")
    package = package.replace("_group_", f"_global_.{group.replace('/', '.')}")
    names = f"{parent_package}.{package}".replace("_here_", "").split(".")
    last_global = max((index for index, name in enumerate(names) if name == "_global_"), default=-1)
    return ".".join(filter(None, names[last_global + 1 :]))


def _choice_key(entry: Entry, parent_group: str, parent_package: str) -> str:
    """Return the key with which the option of a group is overridden: its path, and its package if it differs."""
    group = _join(parent_group, entry.group)
    package = _child_package(entry, group, parent_package, None)
    return group if package == group.replace("/", ".") else f"{group}@{package or '_global_'}"


def _error(message: str) -> ConfigError:
    return ConfigError(f"cannot compose the config: {message}")
