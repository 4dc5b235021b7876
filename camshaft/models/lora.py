"""LoRA: small trainable layers beside the frozen linear ones of a transformers model.

    add_adapter(hf, LoRAConfig(rank=8), seed=0)         # in place: the class of `hf` and its methods stay
    with disable_adapter(hf): ...                       # the base model
    dict(merged_weights(hf))                            # one weight per weight of the plain model, under its name
    save_adapter(adapter_weights(hf), "out/adapter", config, "models/tiny")    # peft.PeftModel reads it

The layers are those of PEFT, which is imported here alone and only where there is an adapter. The adapter is at
least float32, whatever the base is: small updates of half-precision weights would be lost to rounding.
The weights may be shards; `full` is then what makes a whole tensor of one. It is called in the same order everywhere.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from camshaft.config.engine import LoRAConfig
from camshaft.errors import EngineError
from camshaft.fetch import fetch
from camshaft.models.packed import NUMBER_HEADS
from camshaft.plugins import BROUGHT_BY

Full = Callable[[Tensor], Tensor]

ADAPTER = "default"
"""PEFT's name for the one adapter that a model has here; it is part of parameter names, but not of names in files."""

PREFIX = "base_model.model."
"""What PEFT's files put before each name."""

ALL_LINEAR = "all-linear"

FREE_SETTINGS = {
    "r", "lora_alpha", "target_modules", "exclude_modules", "modules_to_save", "init_lora_weights", "lora_dropout",
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
}  # fmt: skip
"""Keys of adapter_config.json that are looked at one by one, or that do not change what a stored adapter computes."""

HARMLESS_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that left the base weights as they were; the others subtract something from them."""


def add_adapter(hf: PreTrainedModel, config: LoRAConfig, seed: int) -> None:
    """Put an adapter into `hf` and freeze the rest; a fresh one is drawn from `seed` and changes nothing at first.

    On the meta device the layers are there without values, as the model's own are. If anything is wrong with
    `config` or with the folder of an adapter, `hf` is left as it was.
    """
    if adapter_layers(hf):
        raise EngineError(f"this {type(hf).__name__} has an adapter already; load the model again for another one")
    peft = _peft()
    targets = _targets(hf, config)
    shapes = _shapes(hf, targets, config.rank)
    stored = None if config.adapter_path is None else _stored(fetch(config.adapter_path), hf, config, shapes)
    layers = peft.LoraConfig(
        r=config.rank, lora_alpha=_number(config.alpha), target_modules=targets, init_lora_weights=False
    )
    # PEFT builds plain linear layers first, which draw numbers that nobody uses.
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(layers, hf, ADAPTER)
    for layer in adapter_layers(hf).values():
        for part in (layer.lora_A, layer.lora_B):
            weight = part[ADAPTER].weight
            part[ADAPTER].to(torch.promote_types(weight.dtype, torch.float32))
    # PEFT has frozen all but its own. The layer that reads a value or a score off the hidden states stays whole and
    # trainable beside the adapter: a new one is random, and no small change of the decoder makes up for that.
    for name in NUMBER_HEADS:
        if name in hf._modules:
            hf.get_submodule(name).requires_grad_(True)
    with torch.no_grad():
        for name, value in (_drawn(shapes, seed) if stored is None else stored).items():
            parameter = hf.get_parameter(name)
            if not parameter.is_meta:
                parameter.copy_(value)


def adapter_layers(hf: PreTrainedModel) -> dict[str, Any]:
    """The layers that hold a part of the adapter, by their name in the plain model; empty without an adapter."""
    inside = [name for name, module in hf.named_modules() if name.endswith(".lora_A") and ADAPTER in module._modules]
    return {name: hf.get_submodule(name) for name in (part.removesuffix(".lora_A") for part in inside)}


@contextmanager
def disable_adapter(hf: PreTrainedModel) -> Iterator[None]:
    """The base model inside; a value or reward head that was trained beside the adapter stays as it is."""
    on = [layer for layer in _layers_of(hf, "disable_adapter") if not layer.disable_adapters]
    _switch(on, to=False)
    try:
        yield
    finally:
        _switch(on, to=True)


def merged_weights(hf: PreTrainedModel, full: Full = lambda tensor: tensor) -> Iterator[tuple[str, Tensor]]:
    """The weights of a plain model that computes what `hf` computes now, tied ones once; `hf` is left as it is.

    Without an adapter these are simply its weights. Inside `disable_adapter` they are those of the base.
    """
    layers = adapter_layers(hf)
    stored = hf.state_dict().keys()  # has the buffers that belong to the weights, not those that are computed
    buffers = [(name, buffer) for name, buffer in hf.named_buffers() if name in stored]
    for name, tensor in [*hf.named_parameters(), *buffers]:
        if _of_adapter(name):
            continue
        owner, _, part = name.rpartition(".")
        layer = layers.get(owner.removesuffix(".base_layer"))
        if layer is None:
            yield name, full(tensor.detach())
            continue
        whole = full(tensor.detach())
        if part == "weight" and not layer.disable_adapters:
            whole = _merged(whole, layer, full)
        yield f"{owner.removesuffix('.base_layer')}.{part}", whole


def adapter_weights(hf: PreTrainedModel, full: Full = lambda tensor: tensor) -> Iterator[tuple[str, Tensor]]:
    """The adapter, and a trained head beside it, under the names of PEFT's adapter_model.safetensors."""
    _layers_of(hf, "adapter_weights")
    for name, parameter in hf.named_parameters():
        if _of_adapter(name) or _of_head(name):
            yield PREFIX + name.replace(f".{ADAPTER}.", "."), full(parameter.detach())


def with_scaling(weights: Iterable[tuple[str, Tensor]], config: LoRAConfig) -> Iterator[tuple[str, Tensor]]:
    """What `adapter_weights` gave, alpha / rank multiplied into B: a layer then computes base + B A."""
    for name, tensor in weights:
        yield name, tensor * (config.alpha / config.rank) if name.endswith(".lora_B.weight") else tensor


def adapter_shapes(hf: PreTrainedModel, config: LoRAConfig) -> dict[str, tuple[int, int]]:
    """What `adapter_weights` would give of the plain model `hf` with such an adapter: names and shapes."""
    shapes = _shapes(hf, _targets(hf, config), config.rank)
    return {PREFIX + name.replace(f".{ADAPTER}.", "."): shape for name, shape in shapes.items()}


def save_adapter(
    weights: Iterable[tuple[str, Tensor]], folder: str | Path, config: LoRAConfig, base_model_path: str
) -> None:
    """Write what `adapter_weights` gave as a folder that `peft.PeftModel.from_pretrained` loads."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    names = [name.removeprefix(PREFIX) for name in tensors]
    layers = sorted({name.rpartition(".lora_")[0] for name in names if ".lora_" in name})
    if not layers:
        raise EngineError(f"save_adapter: there is no adapter among these weights: {', '.join(names[:3]) or 'none'}")
    # Last parts of names are what other tools know; they are enough unless layers of one kind were told apart.
    told_apart = config.exclude_modules or any("." in ending for ending in _endings(config.target_modules))
    settings = _peft().LoraConfig(
        base_model_name_or_path=base_model_path,
        r=config.rank,
        lora_alpha=_number(config.alpha),
        target_modules=layers if told_apart else _kinds(layers),
        modules_to_save=sorted({name.split(".")[0] for name in names if _of_head(name)}) or None,
        task_type=None if any(_of_head(name) for name in names) else "CAUSAL_LM",
        inference_mode=True,
    )
    facts = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.to_dict().items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(facts, indent=2, sort_keys=True), encoding="utf-8")


def load_adapter(hf: PreTrainedModel, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """`hf` with the adapter of a folder, as users of PEFT load it; its tensors as PEFT holds them, by file name."""
    peft = _peft()
    with torch.random.fork_rng(devices=[]):
        model = peft.PeftModel.from_pretrained(hf, str(folder))
    return model, peft.get_peft_model_state_dict(model)


# -- which layers -------------------------------------------------------------------------------------


def _targets(hf: PreTrainedModel, config: LoRAConfig) -> list[str]:
    """Names of the layers that get a part of the adapter, in the model's order.

    Heads, that on the vocabulary too, sit outside the decoder and are never adapted. Nor are experts that
    transformers keeps fused in one tensor.
    """
    decoder = {id(module) for module in hf.base_model.modules()}
    modules = [(name, module) for name, module in hf.named_modules() if name]
    linear = [name for name, module in modules if isinstance(module, nn.Linear) and id(module) in decoder]
    endings = _endings(config.target_modules)
    for ending in endings:
        if ending != ALL_LINEAR and not _ending_with([ending], linear):
            raise _nothing_ends_with("target_modules", ending, linear, hf)
    for ending in config.exclude_modules:
        if not _ending_with([ending], [name for name, _ in modules]):
            raise _nothing_ends_with("exclude_modules", ending, linear, hf)
    chosen = linear if ALL_LINEAR in endings else _ending_with(endings, linear)
    left_alone = set(_ending_with(config.exclude_modules, chosen))
    chosen = [name for name in chosen if name not in left_alone]
    if not chosen:
        raise EngineError(
            f"lora: target_modules={config.target_modules} without exclude_modules={config.exclude_modules} leaves no "
            f"linear layer of {type(hf).__name__}; it has {', '.join(_kinds(linear)) or 'none'}"
        )
    return chosen


def _endings(target_modules: str | Iterable[str]) -> tuple[str, ...]:
    return (target_modules,) if isinstance(target_modules, str) else tuple(target_modules)


def _ending_with(endings: Iterable[str], names: Iterable[str]) -> list[str]:
    """Those `names` whose last parts are one of `endings`; "proj" is not an ending of "q_proj"."""
    dotted = tuple(f".{ending}" for ending in endings)
    return [name for name in names if f".{name}".endswith(dotted)] if dotted else []


def _kinds(layers: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in layers})


def _nothing_ends_with(key: str, ending: str, linear: list[str], hf: PreTrainedModel) -> EngineError:
    kinds = _kinds(linear)
    close = difflib.get_close_matches(ending.rpartition(".")[2], kinds, n=2)
    hint = f"did you mean {' or '.join(repr(name) for name in close)}? " if close else ""
    return EngineError(
        f"lora.{key}: no linear layer in the decoder of {type(hf).__name__} is called '{ending}'; {hint}"
        f"It has {', '.join(kinds) or 'none'}. Write endings of layer names, or {ALL_LINEAR}"
    )


def _shapes(hf: PreTrainedModel, targets: Iterable[str], rank: int) -> dict[str, tuple[int, int]]:
    """Parameters of the adapter with their shapes, in the model's order."""
    shapes: dict[str, tuple[int, int]] = {}
    for name in targets:
        layer: Any = hf.get_submodule(name)
        shapes[f"{name}.lora_A.{ADAPTER}.weight"] = (rank, layer.in_features)
        shapes[f"{name}.lora_B.{ADAPTER}.weight"] = (layer.out_features, rank)
    return shapes


# -- values -------------------------------------------------------------------------------------------


def _drawn(shapes: Mapping[str, tuple[int, int]], seed: int) -> dict[str, Tensor]:
    """A uniform as PEFT has it and B zero; drawn on the CPU in float32, so the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    values = {}
    for name, shape in shapes.items():
        values[name] = torch.zeros(shape, dtype=torch.float32, device="cpu")
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(values[name], a=math.sqrt(5), generator=generator)
    return values


def _stored(
    folder: Path, hf: PreTrainedModel, config: LoRAConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """The tensors of an adapter folder by parameter name, all of them of this model and of this config."""
    folder = folder.expanduser()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise EngineError(
                f"lora.adapter_path: {folder} has no {name}; give a folder that PEFT's save_pretrained wrote"
            )
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except (ValueError, SafetensorError) as error:
        raise EngineError(f"lora.adapter_path: the adapter in {folder} cannot be read: {error}") from error
    _agree(folder, settings, config)
    # As with a model folder, the head of a value model may be missing: it then stays as the model has it.
    heads = {name: tuple(parameter.shape) for name, parameter in hf.named_parameters() if _of_head(name)}
    found = {_parameter_name(name): tensor for name, tensor in tensors.items()}
    adapted, wanted = _layers_in(found), _layers_in(shapes)
    if adapted and adapted != wanted:
        raise EngineError(
            f"lora.target_modules={config.target_modules} chooses {len(wanted)} layers ({', '.join(_kinds(wanted))}), "
            f"but the adapter in {folder} has {len(adapted)} ({', '.join(_kinds(adapted))}); they differ by "
            f"{', '.join(sorted(wanted ^ adapted)[:4])}. Set target_modules={settings.get('target_modules')}, "
            f"exclude_modules={settings.get('exclude_modules')}"
        )
    problems = [f"{name} is missing" for name in sorted(shapes.keys() - found.keys())]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - shapes.keys() - heads.keys())]
    for name, want in {**shapes, **heads}.items():
        if name in found and tuple(found[name].shape) != want:
            problems.append(f"{name} is {tuple(found[name].shape)}, not {want}")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise EngineError(f"the adapter in {folder} is not one of this {type(hf).__name__}: {shown}")
    return found


def _agree(folder: Path, settings: Mapping[str, Any], config: LoRAConfig) -> None:
    """An error if the stored adapter means something else than `config`, or than a plain low-rank adapter."""
    if settings.get("peft_type") != "LORA":
        raise EngineError(f"the adapter in {folder} has peft_type={settings.get('peft_type')}; only LORA is known here")
    for ours, theirs, value in (("rank", "r", config.rank), ("alpha", "lora_alpha", config.alpha)):
        if settings.get(theirs) != value:
            raise EngineError(
                f"lora.{ours}={_number(value)}, but the adapter in {folder} has {theirs}={settings.get(theirs)}; "
                f"set lora.{ours}={settings.get(theirs)}"
            )
    plain = _peft().LoraConfig().to_dict()
    for key, value in settings.items():
        if key not in FREE_SETTINGS and value != plain.get(key) and value not in (None, False, [], {}):
            raise EngineError(f"the adapter in {folder} has {key}={value}, which plain LoRA layers would leave out")
    beginning = settings.get("init_lora_weights", True)
    if beginning not in HARMLESS_BEGINNINGS:
        raise EngineError(
            f"the adapter in {folder} was begun with init_lora_weights={beginning}, which also changes the base model; "
            "convert it to a plain one first: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )


def _merged(weight: Tensor, layer: Any, full: Full) -> Tensor:
    """The base weight with the adapter added, computed in float32 or wider."""
    a, b = (full(part[ADAPTER].weight.detach()) for part in (layer.lora_A, layer.lora_B))
    wide = torch.promote_types(weight.dtype, torch.promote_types(a.dtype, torch.float32))
    return (weight.to(wide) + layer.scaling[ADAPTER] * (b.to(wide) @ a.to(wide))).to(weight.dtype)


# -- small parts --------------------------------------------------------------------------------------


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise EngineError(f"LoRA needs '{error.name}': pip install '{BROUGHT_BY['peft']}'") from error
    return peft


def _layers_of(hf: PreTrainedModel, asked: str) -> list[Any]:
    layers = list(adapter_layers(hf).values())
    if not layers:
        raise EngineError(f"{asked}: this model has no adapter; set EngineModel.lora to give it one")
    return layers


def _switch(layers: Iterable[Any], to: bool) -> None:
    """Turn these layers on or off, and nothing else: PEFT would also choose anew which parameters are trainable."""
    for layer in layers:
        trainable = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
        layer.enable_adapters(to)
        for parameter, flag in trainable:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)


def _of_adapter(name: str) -> bool:
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name


def _of_head(name: str) -> bool:
    return name.split(".")[0] in NUMBER_HEADS


def _parameter_name(name: str) -> str:
    """The parameter behind a name in PEFT's file."""
    name = name.removeprefix(PREFIX)
    return name.replace(".lora_A.", f".lora_A.{ADAPTER}.").replace(".lora_B.", f".lora_B.{ADAPTER}.")


def _layers_in(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".lora_")[0] for name in names if _of_adapter(name)}


def _number(value: float) -> int | float:
    """16 and not 16.0: other readers of adapter_config.json take alpha for a whole number."""
    return int(value) if float(value).is_integer() else value
