"""Changes that re-implementations of a model make by mistake, as variants of the oracle.

for change in changes(oracle): ...          # the most common first
for family in families(oracle): ...         # changes by a number that is searched for
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.activations import ACT2CLS

from camshaft.parity.model.oracle import Change, Oracle, Scores, Weights

THETAS = (1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 8e6, 1e7)
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 1e-4, 1e-7, 0.0)
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
NEUTRAL = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1.0),
    **dict.fromkeys(("routed_scaling_factor", "scale_emb", "scale_depth", "lm_head_multiplier"), 1.0),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), None),
}
"""Values without effect of config keys that multiply or limit."""
COUNTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "topk_group", "n_group")
MAX_PAIRS = 8
"""Number of experts up to which every exchange of two is tried."""


@dataclass(frozen=True)
class Family:
    """Changes by a number between two limits, of which the best is searched for on a logarithmic scale."""

    low: float
    high: float
    change: Callable[[float], Change]


def changes(oracle: Oracle) -> Iterator[Change]:
    """Yield the changes that are possible for the model of an oracle, the most common first."""
    values, weights = oracle.config.get_text_config().to_dict(), oracle.weights
    yield from _rope_changes(values)
    yield from _score_changes(oracle, values)
    yield from _window_changes(values)
    yield from _value_changes(values)
    yield from _module_changes(oracle.model)
    yield from _weight_changes(oracle, values, weights)


def families(oracle: Oracle) -> Iterator[Family]:
    """Yield the searches for a rope theta and for an attention scale."""
    for path, rope in _ropes(oracle.config.get_text_config().to_dict()):
        yield Family(1e2, 1e9, partial(_theta_change, oracle.config.get_text_config().to_dict(), path, rope))
    yield Family(1 / 256, 256, _scale_change)


# -- config ----------------------------------------------------------------------------------------


def _ropes(values: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the rotary parameters with the kind of layers that they apply to, or an empty string for all."""
    parameters = values.get("rope_parameters") or {}
    if "rope_theta" in parameters:
        return [("", parameters)]
    return [(kind, rope) for kind, rope in parameters.items() if isinstance(rope, Mapping) and "rope_theta" in rope]


def _with_rope(values: Mapping[str, Any], kind: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {**values["rope_parameters"], kind: rope} if kind else dict(rope)}


def _theta_change(values: Mapping[str, Any], kind: str, rope: Mapping[str, Any], theta: float) -> Change:
    layers = f" in {kind} layers" if kind else ""
    detail = f"with rope_theta={theta:g} instead of {rope['rope_theta']:g}{layers}"
    return Change("rope theta", detail, config=_with_rope(values, kind, {**rope, "rope_theta": theta}))


def _rope_changes(values: Mapping[str, Any]) -> Iterator[Change]:
    for kind, rope in _ropes(values):
        theta = rope["rope_theta"]
        for other in dict.fromkeys((*THETAS, theta * 10, theta / 10)):
            if other != theta:
                yield _theta_change(values, kind, rope, float(other))
        if rope.get("rope_type", "default") != "default":
            plain = {"rope_type": "default", "rope_theta": theta}
            detail = f"without the scaling of rotary positions ({rope['rope_type']})"
            yield Change("rope scaling", detail, config=_with_rope(values, kind, plain))
        share = rope.get("partial_rotary_factor", 1.0)
        for other in {1.0, 0.5, 0.25} - {share}:
            detail = f"with partial_rotary_factor={other} instead of {share}"
            changed = {**rope, "partial_rotary_factor": other}
            yield Change("partial rotary factor", detail, config=_with_rope(values, kind, changed))


def _window_changes(values: Mapping[str, Any]) -> Iterator[Change]:
    window, types = values.get("sliding_window"), values.get("layer_types")
    if not isinstance(window, int):
        return
    for other in (window + 1, window - 1):
        detail = f"with sliding_window={other} instead of {window}"
        yield Change("window off by one", detail, config={"sliding_window": other})
    detail = f"without the sliding window of {window} tokens"
    yield Change("missing window", detail, config={"sliding_window": 1 << 20})
    if types and len(set(types)) == 2:
        first, second = sorted(set(types))
        exchanged = [second if kind == first else first for kind in types]
        detail = f"with {first} and {second} layers exchanged"
        yield Change("layer types", detail, config={"layer_types": exchanged})


def _value_changes(values: Mapping[str, Any]) -> Iterator[Change]:
    for key, value in values.items():
        for other in _other_values(key, value):
            cause = "norm eps" if key.endswith(("eps", "epsilon")) else key
            yield Change(cause, f"with {key}={other} instead of {value}", config={key: other})


def _other_values(key: str, value: Any) -> Iterable[Any]:
    """Return the values to try for a config key."""
    if key.endswith(("eps", "epsilon")) and isinstance(value, float):
        return [other for other in EPSILONS if other != value]
    if key in ("hidden_act", "hidden_activation", "activation_function"):
        return [other for other in ACTIVATIONS if other != value]
    if key in NEUTRAL and value not in (None, NEUTRAL[key]):
        return [NEUTRAL[key]]
    if key == "norm_topk_prob":
        return [not value]
    if key in COUNTS and isinstance(value, int):
        return [other for other in (value + 1, value - 1) if other > 0]
    return []


# -- attention scores ------------------------------------------------------------------------------


def _scale_change(factor: float) -> Change:
    return Change("attention scale", f"with attention scores times {factor:.4g}", scores=Scores(factor=factor))


def _score_changes(oracle: Oracle, values: Mapping[str, Any]) -> Iterator[Change]:
    size = values.get("head_dim") or values.get("hidden_size", 1) // (values.get("num_attention_heads") or 1)
    for factor in dict.fromkeys((math.sqrt(size), 1 / math.sqrt(size), 2.0, 0.5, math.sqrt(2), math.sqrt(0.5))):
        yield _scale_change(factor)
    for diagonal, text in ((1, "also attends to the next token"), (-1, "does not attend to itself")):
        yield Change("mask off by one", f"in which each token {text}", scores=Scores(diagonal=diagonal))
    if (values.get("num_key_value_heads") or values.get("num_attention_heads")) == values.get("num_attention_heads"):
        yield Change("q and k swapped", "with queries and keys exchanged", scores=Scores(swap=True))
    if any(name.endswith("sinks") for name in oracle.weights):
        yield Change("attention sinks", "without attention sinks", scores=Scores(sinks=False))


# -- modules ---------------------------------------------------------------------------------------


def _modules(model: nn.Module, fits: Callable[[str, nn.Module], bool]) -> dict[str, list[nn.Module]]:
    """Return the modules that fit, by the last part of their names."""
    found: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if path and fits(name, module):
            found.setdefault(name, []).append(module)
    return found


def _replace_output(
    modules: Iterable[nn.Module], output: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[nn.Module], list[RemovableHandle]]:
    """Return a hook of a change that replaces the outputs of modules by a function of their inputs and outputs."""

    def replace(_: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> Tensor:
        return output(given[0], result)

    return lambda _: [each.register_forward_hook(replace) for each in modules]


def _module_changes(model: nn.Module) -> Iterator[Change]:
    """Yield changes that leave out an activation, a gate, or a norm."""
    classes: Any = tuple({each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()})
    is_gated = any("gate_proj" in name or "gate_up_proj" in name for name, _ in model.named_parameters())
    for name, modules in _modules(model, lambda _, module: isinstance(module, classes)).items():
        if is_gated:
            detail = f"without the gate of its MLPs ({name} of the gate is replaced by 1)"
            yield Change("missing gate", detail, hook=_replace_output(modules, lambda _, out: torch.ones_like(out)))
        detail = f"without the activation function {name}"
        yield Change("missing activation", detail, hook=_replace_output(modules, lambda given, _: given))
    gates = _modules(model, lambda name, module: isinstance(module, nn.Linear) and name.endswith(("_gate", "g_proj")))
    for name, modules in gates.items():
        detail = f"without the gate {name} (its sigmoid is 1)"
        yield Change("missing gate", detail, hook=_replace_output(modules, lambda _, out: torch.full_like(out, 1e4)))
    for name, modules in _modules(model, lambda name, _: "norm" in name or name.startswith("ln_")).items():
        yield Change("missing norm", f"without {name}", hook=_replace_output(modules, lambda given, _: given))


# -- weights ---------------------------------------------------------------------------------------


def _weight_changes(oracle: Oracle, values: Mapping[str, Any], weights: Weights) -> Iterator[Change]:
    if any(name.endswith("q_proj.weight") for name in weights):
        yield Change("q and k swapped", "with the weights of queries and keys exchanged", weights=_exchange_q_and_k)
        size = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        detail = "with rotary pairs of neighboring instead of half-distant channels"
        yield Change("rotary layout", detail, weights=partial(_interleave, size=size))
    if any(name.endswith(("gate_proj.weight", "gate_up_proj.weight", "gate_up_proj")) for name in weights):
        yield Change("gate and up swapped", "with gate and up projection exchanged", weights=_exchange_gate_and_up)
    for last in sorted({".".join(name.split(".")[-2:]) for name in weights if name.endswith(".bias")}):
        yield Change("missing bias", f"without {last}", weights=partial(_zero, suffix=last))
    if any(name.endswith("norm.weight") for name in weights):
        for offset in (1.0, -1.0):
            detail = f"with {offset:+g} added to the weights of all norms"
            yield Change("norm weight offset", detail, weights=partial(_shift_norms, offset=offset))
    experts = [weight for name, weight in weights.items() if ".experts." in name and weight.ndim == 3]
    for order in _orders(len(experts[0])) if experts else ():
        detail = f"with its experts in the order {_text(order)}"
        yield Change("expert order", detail, weights=partial(_reorder_experts, order=order))


def _exchange_q_and_k(weights: Weights) -> Weights:
    """Split the stacked weights of queries and keys as if the keys came first."""
    changed = dict(weights)
    for name in weights:
        other = name.replace("q_proj.", "k_proj.")
        if "q_proj." in name and other in weights:
            keys = len(weights[other])
            stacked = torch.cat([weights[name], weights[other]])
            changed[other], changed[name] = stacked[:keys], stacked[keys:]
    return changed


def _interleave(weights: Weights, size: int) -> Weights:
    """Reorder the channels of each head of queries and keys, so that neighbors become half-distant."""
    changed = dict(weights)
    for name, weight in weights.items():
        if any(part in name for part in ("q_proj.", "k_proj.", "q_norm.", "k_norm.")) and len(weight) % size == 0:
            heads = weight.unflatten(0, (-1, size // 2, 2))
            changed[name] = heads.transpose(1, 2).flatten(0, 2)
    return changed


def _exchange_gate_and_up(weights: Weights) -> Weights:
    changed = dict(weights)
    for name, weight in weights.items():
        if "gate_proj." in name and (other := name.replace("gate_proj.", "up_proj.")) in weights:
            changed[name], changed[other] = weights[other], weight
        elif "gate_up_proj" in name:
            dim = 1 if weight.ndim == 3 else 0
            changed[name] = torch.cat(weight.chunk(2, dim)[::-1], dim)
    return changed


def _zero(weights: Weights, suffix: str) -> Weights:
    return {name: torch.zeros_like(w) if name.endswith(suffix) else w for name, w in weights.items()}


def _shift_norms(weights: Weights, offset: float) -> Weights:
    return {name: w + offset if name.endswith("norm.weight") else w for name, w in weights.items()}


def _reorder_experts(weights: Weights, order: tuple[int, ...]) -> Weights:
    return {name: w[list(order)] if ".experts." in name and len(w) == len(order) else w for name, w in weights.items()}


def _orders(count: int) -> Iterator[tuple[int, ...]]:
    """Yield orders of experts: rolled, reversed, in blocks of other sizes and, if there are few, two exchanged."""
    plain = tuple(range(count))
    found = [plain[1:] + plain[:1], plain[-1:] + plain[:-1], plain[::-1]]
    sizes = [size for size in range(2, count) if count % size == 0]
    found += [tuple(torch.arange(count).view(-1, size).T.flatten().tolist()) for size in sizes]
    for first, second in itertools.combinations(plain, 2) if count <= MAX_PAIRS else ():
        found.append(tuple({first: second, second: first}.get(item, item) for item in plain))
    yield from dict.fromkeys(found)


def _text(order: tuple[int, ...]) -> str:
    return ", ".join(map(str, order[:8])) + (", ..." if len(order) > 8 else "")
