"""Read the config files that Hydra composes: the file of `--config-name`, and the files in its defaults list.

    keys_of_files(PPOConfig, overrides, hydra_config, defaults)
    # {"algorithm.adv_estimator": "dapo", "actor_rollout_ref.actor.optim.lr": 1e-5}

Hydra merges short names, such as `lr`, separately from the keys that they set. It also replaces `algorithm: dapo` by
the section if another file or an override sets a key such as `algorithm.lam`. Therefore short names are expanded in
each file before the files are merged.
"""

import math
import os.path
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from camshaft.config.schema.fields import Section
from camshaft.config.short_names import REWARD, REWARD_KEYS, expand_short_names, reset_reward, short_names
from camshaft.config.tree import expand_keys, flatten, has_key, leaf_fields, put
from camshaft.errors import ConfigError

MAX_VALUES = 100_000
"""Maximum number of values in a config file."""


def keys_of_files(schema: type[Section], overrides: Sequence[str], hydra_config: Any, defaults: Path) -> dict[str, Any]:
    """Return the keys that config files set, with the value of the last file, even if it is the default.

    Args:
        schema: Schema of the config.
        overrides: Overrides from which Hydra composed the config. A key that they delete is omitted.
        hydra_config: Section `hydra` of the composed config.
        defaults: Folder of the config files that contain only defaults.
    """
    leaves = leaf_fields(schema)
    keys: dict[str, Any] = {}
    for content in _contents(overrides, hydra_config, defaults):
        if REWARD in content:
            keys |= reset_reward()
        keys |= flatten(expand_keys(expand_short_names(content, schema), leaves), leaves)
    deleted = [override[1:].partition("=")[0] for override in overrides if override.startswith("~")]
    return {key: value for key, value in keys.items() if not any(f"{key}.".startswith(f"{name}.") for name in deleted)}


def check_aliases(folder: Path) -> None:
    """Raise `ConfigError` if the aliases of a config file in a folder stand for more values than `MAX_VALUES`.

    Hydra copies the value of an alias, so a file of a few lines can take all memory. Files that are not valid YAML are
    left to Hydra, which reports them if it reads them.
    """
    for file in sorted([*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]):
        try:
            text = file.read_text(encoding="utf-8")
            node = yaml.compose(text, yaml.SafeLoader) if "&" in text and "*" in text else None
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
            continue
        if node is not None and _num_values(node, {}) > MAX_VALUES:
            raise ConfigError(
                f"{file}: its aliases (*name) stand for more than {MAX_VALUES} values; write fewer aliases"
            )


def _num_values(node: yaml.Node, counts: dict[int, float]) -> float:
    """Return the number of values below a node with all aliases replaced; infinity if it contains itself."""
    if id(node) not in counts:
        counts[id(node)] = math.inf
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        nodes = [child for item in children for child in (item if isinstance(item, tuple) else [item])]
        counts[id(node)] = 1 + sum(_num_values(child, counts) for child in nodes)
    return counts[id(node)]


def merge_files(
    tree: Mapping[str, Any], file_keys: Mapping[str, Any], schema: type[Section], set_keys: Collection[str]
) -> dict[str, Any]:
    """Replace the short names of config files in a composed config with the keys that they set.

    The keys in `set_keys`, which overrides set, keep their values. So do sections, from which Hydra removes the keys of
    a file if another file sets a short name that has the name of the section, such as `algorithm`.
    """
    names = short_names(schema)
    merged = {
        name: value
        for name, value in tree.items()
        if name not in names or name in set_keys or isinstance(value, Mapping)
    }
    merged = expand_keys(merged, leaf_fields(schema))
    short_keys = {*names.values(), *(REWARD_KEYS if REWARD in names else ())}
    for key, value in file_keys.items():
        is_lost = key.partition(".")[0] in names and not has_key(merged, key)
        if key not in set_keys and (key in short_keys or is_lost):
            put(merged, key, value)
    return merged


def _contents(overrides: Sequence[str], hydra_config: Any, defaults: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the contents of the config files in the order in which Hydra merges them."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    loader = GlobalHydra.instance().config_loader()
    folders = [source.path for source in hydra_config.runtime.config_sources if source.schema == "file"]
    for part in loader.compute_defaults_list(hydra_config.job.config_name, list(overrides), RunMode.RUN).defaults:
        name = str(part.config_path).removesuffix(".yaml")
        files = (os.path.join(folder, f"{name}.yaml") for folder in folders)
        file = next(filter(os.path.isfile, files), None)
        if file is None or Path(file).is_relative_to(defaults):
            continue
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        if isinstance(content, dict):
            prefix = f"{part.package}." if part.package else ""
            yield {f"{prefix}{key}": value for key, value in content.items() if key != "defaults"}
