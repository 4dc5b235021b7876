"""From YAML files and command-line words to a checked config.

    config = load_ppo(["trainer.device=cpu", "algorithm.adv_estimator=grpo"])

Hydra composes; what it made is laid over the defaults, so a file may hold a few keys only and a deleted key
falls back to its default. Then older names are renamed, `${...}` is resolved, and every check runs. All that
is wrong comes as one `ConfigError`. This is for programs; `command.py` does the same for a command line.
"""

import contextlib
import copy
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from camshaft.config.aliases import rename
from camshaft.config.backends import rollouts_that_read, unread_by
from camshaft.config.checks import check
from camshaft.config.not_yet import refusals
from camshaft.config.problems import Problem, from_validation, report
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import Section
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import RMConfig, SFTConfig, SupervisedConfig
from camshaft.config.tree import abbreviated, flatten, get, has, leaf_fields, nested, put, remove, shown
from camshaft.errors import CamshaftError, ConfigError

Config = TypeVar("Config", PPOConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig)

HOME = Path(__file__).parent
DEFAULTS: dict[type[Section], str] = {
    PPOConfig: "ppo_trainer",
    SFTConfig: "sft_trainer",
    RMConfig: "rm_trainer",
    GenerateConfig: "generation",
    EvalConfig: "evaluation",
}
"""The file of defaults of each schema."""

logger = logging.getLogger("camshaft.config")

_PLAIN = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=")
_PATH = re.compile(r"(?!\w+\(|[\[{])(?!.*\$\{)[^,'\"]*/[^,'\"]*")


def load_ppo(overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None) -> PPOConfig:
    """The config of an RL run: defaults, then the file `config_name` of `config_dir`, then `overrides`."""
    return _load(PPOConfig, overrides, config_dir, config_name)


def load_sft(overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None) -> SFTConfig:
    """The same for a supervised run."""
    return _load(SFTConfig, overrides, config_dir, config_name)


def load_rm(overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None) -> RMConfig:
    """The same of the training of a reward model."""
    return _load(RMConfig, overrides, config_dir, config_name)


def load_generate(
    overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None
) -> GenerateConfig:
    """The same of `camshaft generate`."""
    return _load(GenerateConfig, overrides, config_dir, config_name)


def load_eval(
    overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None
) -> EvalConfig:
    """The same of `camshaft eval`."""
    return _load(EvalConfig, overrides, config_dir, config_name)


def from_container(
    container: Mapping[str, Any], schema: type[Config], set_keys: Collection[str] | None = None
) -> Config:
    """A nested dict as a checked config; keys that it lacks come from the defaults.

    `set_keys` are those that a person set by hand, where the dict holds others too.
    """
    leaves = leaf_fields(schema)
    written = nested(container, leaves)
    by_hand = flatten(written, leaves).keys() if set_keys is None else set_keys
    tree, problems = rename(written, raw_defaults(schema), by_hand, leaves)
    values, unresolved = resolve(tree, schema)
    problems += unresolved
    config, wrong = _validated(values, schema, {problem.key for problem in problems})
    problems += wrong
    for found in (refusals(config.model_dump(), schema), check(config), _correction_is_off(config, schema)):
        keys = [key for problem in problems for key in (problem.key, *problem.others)]
        problems += [problem for problem in found if not problem.rests_on(keys)]
    if problems:
        raise ConfigError(report(problems))
    _tell(config, by_hand)
    _tell_of_generators(tree, frozenset(set_keys or ()))
    return config


@cache
def _default_file(schema: type[Section]) -> DictConfig:
    found = OmegaConf.load(HOME / f"{DEFAULTS[schema]}.yaml")
    assert isinstance(found, DictConfig)
    return found


def raw_defaults(schema: type[Section]) -> dict[str, Any]:
    """The defaults as they are written, `${...}` unresolved."""
    return plain(_default_file(schema))


@cache
def resolved_defaults(schema: type[Section]) -> Mapping[str, Any]:
    """The defaults with their values."""
    return plain(_default_file(schema), resolve=True)


def resolve(tree: Mapping[str, Any], schema: type[Section]) -> tuple[dict[str, Any], list[Problem]]:
    """`tree` over the defaults with `${...}` filled in; where that fails, the default and a problem.

    A default fails for want of what somebody wrote elsewhere, and that is told by itself.
    """
    leaves, defaults = leaf_fields(schema), raw_defaults(schema)
    written, problems = copy.deepcopy(_laid_over(defaults, tree)), []
    for key, value in flatten(tree, leaves).items():
        if value == "???":
            problems.append(Problem(key, value, "has no value yet. Set it."))
            _reset(written, key, schema)
    while True:
        try:
            return plain(OmegaConf.create(written), resolve=True), problems
        except OmegaConfBaseException as error:
            key = _holder(written, error.full_key or "", leaves)
            if not key:
                raise ConfigError(f"the config cannot be put together: {error}") from error
            if not has(defaults, key) or get(written, key) != get(defaults, key):
                problems.append(Problem(key, get(written, key), str(error).splitlines()[0]))
            _reset(written, key, schema)


def compose(
    schema: type[Section], overrides: Sequence[str], config_dir: str | None = None, config_name: str | None = None
) -> dict[str, Any]:
    """What Hydra makes of a file and overrides, `${...}` unresolved, nothing checked."""
    import hydra

    folder = HOME if config_dir is None else Path(os.path.expanduser(config_dir)).absolute()
    name = config_name or DEFAULTS[schema]
    words = forced(list(overrides), [str(folder)])
    if folder != HOME:
        in_folder = os.path.isfile(folder / f"{name.removesuffix('.yaml')}.yaml")
        words.append(f"hydra.searchpath=[file://{HOME if in_folder else folder}]")
        folder = folder if in_folder else HOME
    with (
        as_config_errors(words),
        _hydra_of_our_own(),
        hydra.initialize_config_dir(str(folder), version_base="1.3", job_name="camshaft"),
    ):
        return plain(hydra.compose(name, words))


def _load(schema: type[Config], overrides: Sequence[str], config_dir: str | None, config_name: str | None) -> Config:
    composed = compose(schema, overrides, config_dir, config_name)
    return from_container(composed, schema, keys_of(overrides))


def forced(overrides: list[str], folders: list[str]) -> list[str]:
    """`key=value` as `++key=value`, so that Hydra lets a misspelt key through to our own check.

    Hydra's own keys and config groups (folders next to the file) stay as they are. A path is quoted, which
    Hydra's grammar wants for many characters (~ = # and any accent) and nobody thinks of.
    """

    def one(word: str) -> str:
        key, _, value = word.partition("=")
        group = any(os.path.isdir(os.path.join(os.path.expanduser(folder), key)) for folder in folders)
        if _PATH.fullmatch(value) and not group:
            word = f"{key}='{value}'"
        ours = _PLAIN.match(word) is not None and key.partition(".")[0] != "hydra" and not group
        return f"++{word}" if ours else word

    return [one(word) for word in overrides]


def keys_of(overrides: Sequence[str]) -> set[str]:
    """The keys that somebody typed."""
    return {word.lstrip("+").partition("=")[0] for word in overrides if not word.startswith("~")}


@contextlib.contextmanager
def _hydra_of_our_own() -> Iterator[None]:
    """Compose inside a program that uses Hydra itself: its state is put aside and brought back."""
    from hydra.core.global_hydra import GlobalHydra

    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = before


# -- parts ----------------------------------------------------------------------------------------


def _validated(tree: dict[str, Any], schema: type[Config], known_wrong: set[str]) -> tuple[Config, list[Problem]]:
    """The config, with defaults in the place of wrong values so that later checks can run, and what was wrong."""
    try:
        return schema.model_validate(tree), []
    except ValidationError as error:
        problems = from_validation(error, tree, schema)
    leaves = leaf_fields(schema)
    for problem in problems:
        if any(key == problem.key or key.startswith(f"{problem.key}.") for key in leaves):
            put(tree, problem.key, copy.deepcopy(get(resolved_defaults(schema), problem.key)))
        elif has(tree, problem.key):
            remove(tree, problem.key)
    return schema.model_validate(tree), [problem for problem in problems if problem.key not in known_wrong]


def _correction_is_off(config: Config, schema: type[Config]) -> Iterator[Problem]:
    """Settings of a correction that is not made: whoever changes them believes that it is."""
    section = "algorithm.rollout_correction"
    if not isinstance(config, PPOConfig) or config.algorithm.rollout_correction.rollout_is is not None:
        return
    for leaf in ("rollout_is_threshold", "rollout_is_batch_normalize"):
        key, rests_on = f"{section}.{leaf}", (f"{section}.rollout_is",)
        value = get(config.model_dump(), key)
        if value != get(resolved_defaults(schema), key):
            sentence = f"is not read without {section}.rollout_is. Type {section}.rollout_is=token, or leave it out."
            yield Problem(key, value, sentence, rests_on)


def _holder(tree: Mapping[str, Any], path: str, leaves: Collection[str]) -> str:
    """The key whose value has the node that OmegaConf calls `path`: `a.b` of `a.b[0].c`."""
    key, node = "", tree
    while isinstance(node, Mapping) and key not in leaves:
        name = max((name for name in node if f"{path}.".startswith((f"{name}.", f"{name}["))), key=len, default=None)
        if name is None:
            break
        key, path, node = f"{key}.{name}" if key else name, path[len(name) + 1 :], node[name]
    return key


def _laid_over(defaults: Any, tree: Any) -> Any:
    """`tree`, and what it lacks from `defaults`, in every section."""
    if not isinstance(defaults, Mapping) or not isinstance(tree, Mapping):
        return tree
    return {**defaults, **{name: _laid_over(defaults.get(name), value) for name, value in tree.items()}}


def _reset(tree: dict[str, Any], key: str, schema: type[Section]) -> None:
    """Put the default in the place of a value that cannot be had."""
    defaults = resolved_defaults(schema)
    put(tree, key, copy.deepcopy(get(defaults, key)) if has(defaults, key) else None)


def plain(tree: DictConfig | ListConfig, resolve: bool = False) -> dict[str, Any]:
    """A composed config as a dict."""
    found = OmegaConf.to_container(tree, resolve=resolve)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


@contextlib.contextmanager
def as_config_errors(words: Iterable[str]) -> Iterator[None]:
    """Hydra reads nothing but `words` and the files they name, so whatever it fails with is wrong in these."""
    try:
        yield
    except CamshaftError:
        raise
    except Exception as error:
        raise ConfigError(_told(error, words)) from error


def _told(error: Exception, words: Iterable[str]) -> str:
    """What Hydra found wrong, with its reason."""
    from hydra.errors import HydraException

    reason = f"\n  {error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    words = list(words)
    unreadable = next((word for word in words if not _readable(word)), None)
    if unreadable is not None:
        reason += f"\nin {abbreviated(unreadable)}"
        reason += "\nA value with special characters stands in quotes of its own: \"key='value'\""
    elif not isinstance(error, HydraException | OmegaConfBaseException):
        own = [word for word in words if not word.startswith("++")] or words  # what `forced` left for Hydra to judge
        reason += f"\n({type(error).__name__} in Hydra, of the file or one of: {abbreviated(' '.join(own))})"
    return f"the config cannot be put together: {abbreviated(str(error))}{reason}"


def _readable(word: str) -> bool:
    """Whether Hydra's grammar has a place for this override, and it names a key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return bool(OverridesParser.create().parse_override(word).key_or_group)
    except (HydraException, ValueError, RecursionError):
        return False


def _tell(config: PPOConfig | SupervisedConfig | GenerateConfig | EvalConfig, by_hand: Collection[str]) -> None:
    """One notice for each accepted setting that changes nothing."""
    if isinstance(config, GenerateConfig | EvalConfig):
        return
    models = {"model": config.model} if isinstance(config, SupervisedConfig) else {
        "actor_rollout_ref.model": config.actor_rollout_ref.model,
        "critic.model": config.critic.model,
    }  # fmt: skip
    for key, model in models.items():
        if not model.use_remove_padding:
            logger.warning("config: %s.use_remove_padding=false changes nothing: no token is ever padded", key)
    if "trainer.use_legacy_worker_impl" in by_hand:
        logger.warning("config: trainer.use_legacy_worker_impl changes nothing: there is one implementation")


def _tell_of_generators(tree: Mapping[str, Any], typed: frozenset[str]) -> None:
    """One notice for each key that was typed, and that other generators would read."""
    section = next((path for path in ("actor_rollout_ref.rollout", "rollout") if has(tree, path)), None)
    if section is None or not has(tree, f"{section}.name"):
        return
    for leaf in sorted(unread_by(str(get(tree, f"{section}.name")))):
        key = f"{section}.{leaf}"
        if key in typed and (leaf, get(tree, key)) != ("tensor_model_parallel_size", 1):
            value, readers = shown(get(tree, key)), ", ".join(rollouts_that_read(leaf))
            logger.warning("config: %s=%s changes nothing: read by %s.name=%s", key, value, section, readers)
