"""Convert exceptions of Hydra to config errors that name the override or the file that caused them.

with as_config_errors(overrides):
    hydra.compose(...)
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from camshaft.config.tree import nearest_keys, shorten
from camshaft.errors import CamshaftError, ConfigError


@contextlib.contextmanager
def as_config_errors(overrides: Iterable[str]) -> Iterator[None]:
    """Convert exceptions of Hydra to a `ConfigError`. Invalid `overrides` or config files cause all of them."""
    try:
        yield
    except CamshaftError:
        raise
    except Exception as error:
        raise ConfigError(_hydra_message(error, overrides)) from error


def _hydra_message(error: Exception, overrides: Iterable[str]) -> str:
    """Format an exception of Hydra with its cause and the override that caused it, if known."""
    from hydra.errors import HydraException, MissingConfigException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return _missing_file_message(str(error.missing_cfg_file), str(error))
    reason = f"\n  {error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    overrides = list(overrides)
    invalid = next((override for override in overrides if not _is_parsable(override)), None)
    if invalid is not None:
        reason += f"\nin {shorten(invalid)}"
        reason += "\nQuote a value with special characters: \"key='value'\""
    elif not isinstance(error, HydraException | OmegaConfBaseException):
        # overrides that `prepare_overrides` did not rewrite
        candidates = [override for override in overrides if not override.startswith("++")] or overrides
        reason += (
            f"\n({type(error).__name__} in Hydra, caused by the config file or by {shorten(' '.join(candidates))})"
        )
    return f"cannot compose the config: {shorten(str(error))}{reason}"


def _missing_file_message(name: str, message: str) -> str:
    """Format an error of Hydra for a config file that does not exist. Its message lists the folders of config files."""
    folders = [Path(path) for path in re.findall(r"provider=command-line, path=file://(.*)", message)]
    if not folders:
        return f"camshaft has no config file {name}.yaml; to use your own, set --config-dir to its folder"
    names = [path.stem for folder in folders for path in sorted(folder.glob("*.yaml"))]
    near = nearest_keys(name, names, limit=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return (
        f"no config file {name}.yaml in {', '.join(map(str, folders))} (--config-dir).{hint} "
        f"Config files there: {', '.join(names) or 'none'}"
    )


def _is_parsable(override: str) -> bool:
    """Return True if the grammar of Hydra accepts the override, and the override contains a key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return bool(OverridesParser.create().parse_override(override).key_or_group)
    except (HydraException, ValueError, RecursionError):
        return False
