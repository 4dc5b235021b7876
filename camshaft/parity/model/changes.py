"""Changes that re-implementations of a model make by mistake, as tables of variants of the oracle.

for change in changes(oracle): ...          # the most common first
for family in families(oracle): ...         # changes by a number that is searched for
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from camshaft.parity.model.oracle import Change, Oracle, Scores, Weights

MAX_PAIRS = 8
"""Number of experts up to which every exchange of two is tried."""
ROPE = "rope_parameters"
NO_WINDOW = 1 << 20


class Family(NamedTuple):
    """Changes by a number between two limits, of which the best is searched for on a logarithmic scale."""

    low: float
    high: float
    change: Callable[[float], Change]


def changes(oracle: Oracle) -> Iterator[Change]:
    """Yield the changes that are possible for the model of an oracle, the most common first."""
    values, weights = oracle.values, oracle.weights
    size = values.get("head_dim") or values.get("hidden_size", 1) // (values.get("num_attention_heads") or 1) or 1
    for kind, key, value in _entries(values):
        for other in dict.fromkeys(map(_hashable, _other_values(key, value))):
            if other != _hashable(value):
                yield _config_change(values, kind, key, other)
    yield from map(_scale_change, dict.fromkeys((size**0.5, size**-0.5, 2.0, 0.5, 2**0.5, 0.5**0.5)))
    yield from SCORES
    yield from _module_changes(oracle.model)
    yield from _weight_changes(weights, size)


def families(oracle: Oracle) -> Iterator[Family]:
    """Yield the searches for a rope theta and for an attention scale."""
    for kind, key, _ in _entries(oracle.values):
        if key == "rope_theta":
            yield Family(1e2, 1e9, partial(_config_change, oracle.values, kind, key))
    yield Family(1 / 256, 256, _scale_change)


# -- config ----------------------------------------------------------------------------------------

CAUSES = {"rope_theta": "rope theta", "rope_type": "rope scaling", "sliding_window": "window off by one"}
"""Names of changes of the config; others have the name of their key."""
COMMON: dict[str, tuple[Any, ...]] = {
    "rope_theta": (1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 8e6, 1e7),
    "rope_type": ("default",),
    "partial_rotary_factor": (1.0, 0.5, 0.25),
    "eps": (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 1e-4, 1e-7, 0.0),
    "act": ("silu", "gelu", "gelu_pytorch_tanh", "relu"),
}
"""Common values of config keys."""


def _kind_of_key(key: str) -> str:
    """Return "eps" for the epsilon of a norm, "act" for an activation function, and otherwise the key."""
    match = re.fullmatch(r"(?:.*_)?(eps)(?:ilon)?|hidden_(act)(?:ivation)?|(act)ivation_function", key)
    return key if match is None else next(filter(None, match.groups()))


def _other_values(key: str, value: Any) -> Iterable[Any]:
    """Return the values to try for a config key: common ones, neighbors of a number, and no effect."""
    if (common := COMMON.get(_kind_of_key(key))) is not None:
        return common
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1, value - 1, NO_WINDOW) if key == "sliding_window" else (value + 1, value - 1)
    if isinstance(value, float):
        return (1.0, None)
    if isinstance(value, list) and len(kinds := sorted(set(map(str, value)))) == 2 and set(kinds) == set(value):
        return [[kinds[1 - kinds.index(kind)] for kind in value]]  # of layers, exchanged
    return ()


def _entries(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (kind of layers, key, value) of the rotary parameters, which a kind of layers may have, and of a config."""
    rope = values.get(ROPE) or {}
    for kind, entries in ({"": rope} if "rope_theta" in rope else rope).items():
        if isinstance(entries, Mapping):
            yield from ((kind, key, value) for key, value in {"partial_rotary_factor": 1.0, **entries}.items())
    yield from (("", key, value) for key, value in values.items())


def _config_change(values: Mapping[str, Any], kind: str, key: str, other: Any) -> Change:
    rope = values.get(ROPE) or {}
    entries = values if key in values else rope.get(kind, rope)
    cause = "norm eps" if _kind_of_key(key) == "eps" else CAUSES.get(key, key)
    cause = "missing window" if other == NO_WINDOW else cause
    detail = f"with {key}={_text(other)} instead of {_text(entries.get(key, 1.0))}"
    detail += f" in {kind} layers" if kind else ""
    changed = {key: list(other) if isinstance(other, tuple) else other}
    if key not in values:
        changed = {ROPE: {**rope, kind: {**entries, **changed}} if kind else {**entries, **changed}}
    return Change(cause, detail, config=changed)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else str(value) if isinstance(value, Mapping) else value


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value[:8])) + (", ..." if len(value) > 8 else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- attention scores ------------------------------------------------------------------------------


def _scale_change(factor: float) -> Change:
    return Change("attention scale", f"with attention scores times {factor:.4g}", scores=Scores(factor=factor))


SCORES = (
    Change("mask off by one", "in which each token also attends to the next token", scores=Scores(diagonal=1)),
    Change("mask off by one", "in which each token does not attend to itself", scores=Scores(diagonal=-1)),
    Change("q and k swapped", "with queries and keys exchanged", scores=Scores(swap=True)),
    Change("attention sinks", "without attention sinks", scores=Scores(sinks=False)),
)


# -- modules ---------------------------------------------------------------------------------------

ACTIVATIONS: Any = tuple({each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()})


def _is_activation(_: str, module: nn.Module) -> bool:
    return isinstance(module, ACTIVATIONS)


MODULES: tuple[tuple[str, str, Callable[[str, nn.Module], bool], Callable[[Tensor, Tensor], Tensor]], ...] = (
    (
        "missing gate", "without the gate of its MLPs ({} of the gate is replaced by 1)",
        _is_activation, lambda _, out: torch.ones_like(out),
    ),
    ("missing activation", "without the activation function {}", _is_activation, lambda given, _: given),
    (
        "missing gate", "without the gate {} (its sigmoid is 1)",
        lambda name, module: isinstance(module, nn.Linear) and name.endswith(("_gate", "g_proj")),
        lambda _, out: torch.full_like(out, 1e4),
    ),
    ("missing norm", "without {}", lambda name, _: "norm" in name or name.startswith("ln_"), lambda given, _: given),
)  # fmt: skip
"""Causes, details with the name of the modules, the modules, and their changed output from input and output."""


def _module_changes(model: nn.Module) -> Iterator[Change]:
    named = [(path.rpartition(".")[2], module) for path, module in model.named_modules() if path]
    for cause, detail, fits, output in MODULES:
        for name in dict.fromkeys(name for name, module in named if fits(name, module)):
            yield Change(cause, detail.format(name), module=name, output=output)


# -- weights ---------------------------------------------------------------------------------------


def _weight_changes(weights: Weights, size: int) -> Iterator[Change]:
    ends = sorted({".".join(name.split(".")[-2:]) for name in weights})

    def change(cause: str, detail: str, pattern: str, function: Callable[[Weights, str], Tensor]) -> Iterator[Change]:
        """Yield a change of the weights whose last two parts of the name match the pattern, if there are any."""
        names = {name for name in weights if re.fullmatch(pattern, ".".join(name.split(".")[-2:]))}
        if names:
            yield Change(cause, detail, weight=lambda old, name: function(old, name) if name in names else old[name])

    detail = "with the weights of queries and keys exchanged"
    yield from change("q and k swapped", detail, r"[qk]_proj\..*", _exchange_q_and_k)
    detail = "with rotary pairs of neighboring instead of half-distant channels"
    yield from change("rotary layout", detail, r"[qk]_(proj|norm)\..*", partial(_interleave, size=size))
    detail = "with gate and up projection exchanged"
    yield from change("gate and up swapped", detail, r"(gate|up)_proj\..*|.*gate_up_proj.*", _exchange_gate_and_up)
    for end in (end for end in ends if end.endswith(".bias")):
        yield from change("missing bias", f"without {end}", re.escape(end), lambda old, n: torch.zeros_like(old[n]))
    for offset in (1.0, -1.0):
        detail = f"with {offset:+g} added to the weights of all norms"
        yield from change("norm weight offset", detail, r".*norm\.weight", lambda old, n, by=offset: old[n] + by)
    for order in _orders(next((len(w) for name, w in weights.items() if ".experts." in name and w.ndim == 3), 0)):
        detail = f"with its experts in the order {_text(order)}"
        yield from change("expert order", detail, r"experts\..*", lambda old, n, order=order: old[n][list(order)])


def _exchange_q_and_k(old: Weights, name: str) -> Tensor:
    """Split the stacked weights of queries and keys as if the keys came first."""
    query, key = name.replace("k_proj.", "q_proj."), name.replace("q_proj.", "k_proj.")
    stacked, keys = torch.cat([old[query], old[key]]), len(old[key])
    return stacked[keys:] if name == query else stacked[:keys]


def _interleave(old: Weights, name: str, size: int) -> Tensor:
    """Reorder the channels of each head of queries or keys, so that neighbors become half-distant."""
    weight = old[name]
    return weight if len(weight) % size else weight.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2)


def _exchange_gate_and_up(old: Weights, name: str) -> Tensor:
    if "gate_up_proj" in name:
        dim = 1 if old[name].ndim == 3 else 0
        return torch.cat(old[name].chunk(2, dim)[::-1], dim)
    other = name.replace("gate_proj", "up_proj") if "gate_proj" in name else name.replace("up_proj", "gate_proj")
    return old.get(other, old[name])


def _orders(count: int) -> Iterator[tuple[int, ...]]:
    """Yield orders of experts: rolled, reversed, in blocks of other sizes and, if there are few, two exchanged."""
    plain = tuple(range(count))
    found = [plain[1:] + plain[:1], plain[-1:] + plain[:-1], plain[::-1]] if count else []
    sizes = [size for size in range(2, count) if count % size == 0]
    found += [tuple(torch.arange(count).view(-1, size).T.flatten().tolist()) for size in sizes]
    for first, second in itertools.combinations(plain, 2) if count <= MAX_PAIRS else ():
        found.append(tuple({first: second, second: first}.get(item, item) for item in plain))
    yield from dict.fromkeys(found)
