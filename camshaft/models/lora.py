"""LoRA adapters: trainable low-rank updates of the frozen linear layers of a transformers model.

    add_adapter(hf, LoRAConfig(rank=8), seed=0)         # in place: the class of `hf` and its methods do not change
    with disable_adapter(hf): ...                       # `hf` computes the base model
    dict(merged_weights(hf))                            # weights with the adapter merged, under the base model's names
    save_adapter(adapter_weights(hf), "out/adapter", config, "models/tiny")    # peft.PeftModel reads it

PEFT provides the adapter layers. Only this module imports it, and only for a model with an adapter. The weights of the
adapter and of a trained head are float32 or wider for any base model, because half-precision weights would lose small
updates to rounding. If weights are sharded, the argument `gather` returns the full tensor of a shard; all ranks call it
in the same order.
"""

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from camshaft.config.engine import Head, LoRAConfig
from camshaft.errors import EngineError
from camshaft.fetch import fetch
from camshaft.models.adapted_head import ADAPTER
from camshaft.models.packed import SCALAR_HEADS, named_tensors
from camshaft.plugins import install_command
from camshaft.storage import read_json_object

GatherFn = Callable[[Tensor], Tensor]

PREFIX = "base_model.model."
"""Prefix of the names in PEFT's files."""

ALL_LINEAR = "all-linear"

ATTENTION, MLP = ("attn", "attention"), ("mlp", "feed_forward", "ffn", "moe", "expert")
"""Words in the names of modules that belong to the groups `train_attn` and `train_mlp`."""

MLP_LAYERS = ("fc1", "fc2")
"""Last parts of names of layers of an MLP that has no module of its own."""

FREE_SETTINGS = {
    "r", "lora_alpha", "target_modules", "exclude_modules", "modules_to_save", "init_lora_weights", "lora_dropout",
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
}  # fmt: skip
"""Keys of adapter_config.json that are checked separately, or that do not affect the output of a stored adapter."""

KERNEL_LAYERS = ("dt_proj", "out_proj", "x_proj")
"""Linear layers of state-space mixers. Fused kernels read their weights, so adapters on them would have no effect."""

SUPPORTED_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base weights unchanged. Other values modify them."""


def add_adapter(hf: PreTrainedModel, config: LoRAConfig, seed: int) -> None:
    """Add an adapter to `hf` in place and freeze the other parameters, except a value or reward head.

    The adapter is loaded from `config.adapter_path`. Without a path, it is initialized from `config.seed`, by default
    `seed`, and does not change the model's outputs. On the meta device, the adapter has no values. If `config` or the
    adapter folder is invalid, `EngineError` is raised and `hf` is unchanged.
    """
    if adapter_layers(hf):
        raise EngineError(f"this {type(hf).__name__} already has an adapter; reload the model to add another one")
    peft = _import_peft()
    targets = _targets(hf, config)
    shapes = _shapes(hf, targets, config.rank)
    stored = (
        None if config.adapter_path is None else _load_adapter_tensors(fetch(config.adapter_path), hf, config, shapes)
    )
    layers = peft.LoraConfig(
        r=config.rank, lora_alpha=_to_json_number(config.alpha), target_modules=targets, init_lora_weights=False
    )
    # PEFT initializes its layers randomly; the values are replaced below, and the global random state is restored.
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(layers, hf, ADAPTER)
    for layer in adapter_layers(hf).values():
        for part in (layer.lora_A, layer.lora_B):
            weight = part[ADAPTER].weight
            part[ADAPTER].to(torch.promote_types(weight.dtype, torch.float32))
    # PEFT freezes all other parameters. A value or reward head must be trained fully, because a new head is random and
    # low-rank updates of the decoder cannot compensate for that.
    for name in SCALAR_HEADS:
        if name in hf._modules:
            head = hf.get_submodule(name).requires_grad_(True)
            head.to(torch.promote_types(next(head.parameters()).dtype, torch.float32))
    with torch.no_grad():
        for name, value in (_initial_values(shapes, _seed_of(config, seed)) if stored is None else stored).items():
            parameter = hf.get_parameter(name)
            if not parameter.is_meta:
                parameter.copy_(value)


def adapter_layers(hf: PreTrainedModel) -> dict[str, Any]:
    """Return the adapted layers by their names in the base model; return an empty dict without an adapter."""
    parts = [name for name, module in hf.named_modules() if name.endswith(".lora_A") and ADAPTER in module._modules]
    return {name: hf.get_submodule(name) for name in (part.removesuffix(".lora_A") for part in parts)}


@contextmanager
def disable_adapter(hf: PreTrainedModel) -> Iterator[None]:
    """Disable the adapter inside the context. A value or reward head trained with the adapter is not affected."""
    enabled = [layer for layer in _require_layers(hf, "disable_adapter") if not layer.disable_adapters]
    _set_enabled(enabled, False)
    try:
        yield
    finally:
        _set_enabled(enabled, True)


def merged_weights(
    hf: PreTrainedModel,
    gather: GatherFn = lambda tensor: tensor,
    dtype_of: Callable[[str, Tensor], torch.dtype] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights of `hf` with the adapter merged into the base weights. Tied weights are yielded once.

    The names are those of the model without adapter layers. Inside `disable_adapter`, the base weights are yielded.
    They are cast to the dtypes that `dtype_of` returns for names and base weights. A merged weight is rounded once.
    """
    layers = adapter_layers(hf)
    for name, tensor in named_tensors(hf):
        if _is_adapter_name(name):
            continue
        owner, _, part = name.rpartition(".")
        layer = layers.get(owner.removesuffix(".base_layer"))
        base_name = name if layer is None else f"{owner.removesuffix('.base_layer')}.{part}"
        dtype = tensor.dtype if dtype_of is None else dtype_of(base_name, tensor)
        if layer is None or part != "weight" or layer.disable_adapters:
            yield base_name, gather(tensor.to(dtype))
        else:
            yield base_name, _merge_layer(gather(tensor), layer, gather).to(dtype)


def adapter_weights(hf: PreTrainedModel, gather: GatherFn = lambda tensor: tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights of the adapter and of a trained head, as in PEFT's adapter_model.safetensors."""
    _require_layers(hf, "adapter_weights")
    for name, parameter in hf.named_parameters():
        if _is_adapter_name(name) or _is_head_name(name):
            yield PREFIX + name.replace(f".{ADAPTER}.", "."), gather(parameter.detach())


def apply_scaling(weights: Iterable[tuple[str, Tensor]], config: LoRAConfig) -> Iterator[tuple[str, Tensor]]:
    """Multiply the B matrices among `adapter_weights` by alpha / rank, so that a merged weight is base + B A."""
    for name, tensor in weights:
        yield name, tensor * (config.alpha / config.rank) if name.endswith(".lora_B.weight") else tensor


def adapter_shapes(hf: PreTrainedModel, config: LoRAConfig) -> dict[str, tuple[int, int]]:
    """Return the names and shapes of `adapter_weights` for the base model `hf` after `add_adapter` with `config`."""
    shapes = _shapes(hf, _targets(hf, config), config.rank)
    return {PREFIX + name.replace(f".{ADAPTER}.", "."): shape for name, shape in shapes.items()}


def save_adapter(
    weights: Iterable[tuple[str, Tensor]], folder: str | Path, config: LoRAConfig, base_model_path: str
) -> None:
    """Write the weights that `adapter_weights` yields to a folder that `peft.PeftModel.from_pretrained` can load."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    names = [name.removeprefix(PREFIX) for name in tensors]
    layers = sorted({name.rpartition(".lora_")[0] for name in names if ".lora_" in name})
    if not layers:
        raise EngineError(
            f"save_adapter received no adapter among these weights: {', '.join(names[:3]) or 'none'}; pass the result "
            "of adapter_weights()"
        )
    # Other tools expect the last parts of layer names, such as q_proj. Full names are necessary if only some of the
    # layers with the same last part are adapted.
    has_all_groups = config.train_attn and config.train_mlp
    needs_full_names = (
        not has_all_groups
        or config.exclude_modules
        or any("." in suffix for suffix in _suffixes(config.target_modules))
    )
    settings = _import_peft().LoraConfig(
        base_model_name_or_path=base_model_path,
        r=config.rank,
        lora_alpha=_to_json_number(config.alpha),
        target_modules=layers if needs_full_names else _last_parts(layers),
        modules_to_save=sorted({name.split(".")[0] for name in names if _is_head_name(name)}) or None,
        task_type=None if any(_is_head_name(name) for name in names) else "CAUSAL_LM",
        inference_mode=True,
    )
    entries = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.to_dict().items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(entries, indent=2, sort_keys=True), encoding="utf-8")


def load_adapter(hf: PreTrainedModel, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Load an adapter folder with PEFT; return the PEFT model, and the adapter's tensors by their names in the file."""
    peft = _import_peft()
    with torch.random.fork_rng(devices=[]):
        model = peft.PeftModel.from_pretrained(hf, str(folder))
    return model, peft.get_peft_model_state_dict(model, save_embedding_layers=False)


# -- selection of layers ------------------------------------------------------------------------------


def _targets(hf: PreTrainedModel, config: LoRAConfig) -> list[str]:
    """Return the names of the layers to adapt, in the order of the model.

    Only linear layers of the decoder are adapted, and with `train_unembed` the language-model head. All other heads are
    excluded, and so are experts that transformers fuses into one tensor, and layers whose weights a kernel reads
    (`KERNEL_LAYERS`).
    """
    decoder = {id(module) for module in hf.base_model.modules()}
    modules = [(name, module) for name, module in hf.named_modules() if name]
    linear = [name for name, module in modules if isinstance(module, nn.Linear) and id(module) in decoder]
    linear = [name for name in linear if not _is_read_by_kernel(hf, name)]
    suffixes = _suffixes(config.target_modules)
    for suffix in suffixes:
        if suffix != ALL_LINEAR and not _filter_by_suffix([suffix], linear):
            raise _unmatched_error("target_modules", suffix, linear, hf)
    for suffix in config.exclude_modules:
        if not _filter_by_suffix([suffix], [name for name, _ in modules]):
            raise _unmatched_error("exclude_modules", suffix, linear, hf)
    targets = linear if ALL_LINEAR in suffixes else _filter_by_suffix(suffixes, linear)
    if config.train_unembed and unembed_notice(hf, config, "causal_lm") is None:
        head = hf.get_output_embeddings()
        targets = [*targets, *(name for name, module in modules if module is head)]
    excluded = set(_filter_by_suffix(config.exclude_modules, targets))
    targets = [name for name in targets if name not in excluded and _is_in_groups(name, linear, hf, config)]
    if not targets:
        groups = "".join(f", lora.{name}={value}" for name, value in config.group_fields().items() if name != "seed")
        raise EngineError(
            f"lora.target_modules={config.target_modules} and lora.exclude_modules={config.exclude_modules}{groups} "
            f"select no linear layer of {type(hf).__name__}; its linear layers are "
            f"{', '.join(_last_parts(linear)) or 'none'}"
        )
    return targets


def _is_in_groups(name: str, decoder_layers: Collection[str], hf: PreTrainedModel, config: LoRAConfig) -> bool:
    """Return True if `train_attn` and `train_mlp` select a layer, or the layer is not one of the decoder.

    Raise `EngineError` if it is in neither group.
    """
    if (config.train_attn and config.train_mlp) or name not in decoder_layers:
        return True
    if any(word in name.lower() for word in ATTENTION):
        return config.train_attn
    if any(word in name.lower() for word in MLP) or name.rpartition(".")[2] in MLP_LAYERS:
        return config.train_mlp
    raise EngineError(
        f"lora.train_attn={config.train_attn} and lora.train_mlp={config.train_mlp} do not say if {name} of "
        f"{type(hf).__name__} gets an adapter, because it is a layer of neither group; set lora.target_modules or "
        "lora.exclude_modules, with both groups"
    )


def unembed_notice(hf: PreTrainedModel, config: LoRAConfig, head: Head) -> str | None:
    """Return why `train_unembed` adapts no head of this model, or None if it does, or is not set."""
    if not config.train_unembed:
        return None
    output, embedding = hf.get_output_embeddings() if head == "causal_lm" else None, hf.get_input_embeddings()
    if output is None:
        return (
            f"train_unembed=True: a model with head={head} has no output head to the vocabulary that could be adapted"
        )
    if getattr(output, "weight", None) is getattr(embedding, "weight", ()):
        return "train_unembed=True: this model ties its embeddings; the head gets no adapter"
    return None


def _seed_of(config: LoRAConfig, seed: int) -> int:
    return seed if config.seed is None else config.seed


def _is_read_by_kernel(hf: PreTrainedModel, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    return leaf in KERNEL_LAYERS and hasattr(hf.get_submodule(parent), "A_log")


def _suffixes(target_modules: str | Iterable[str]) -> tuple[str, ...]:
    """Return `target_modules` as a tuple of name suffixes."""
    return (target_modules,) if isinstance(target_modules, str) else tuple(target_modules)


def _filter_by_suffix(suffixes: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the `names` that end in one of `suffixes`, in whole dotted parts: "proj" does not match "q_proj"."""
    dotted = tuple(f".{suffix}" for suffix in suffixes)
    return [name for name in names if f".{name}".endswith(dotted)] if dotted else []


def _last_parts(layers: Iterable[str]) -> list[str]:
    """Return the distinct last parts of layer names, such as q_proj, sorted."""
    return sorted({name.rpartition(".")[2] for name in layers})


def _unmatched_error(key: str, suffix: str, linear: list[str], hf: PreTrainedModel) -> EngineError:
    last_parts = _last_parts(linear)
    matches = difflib.get_close_matches(suffix.rpartition(".")[2], last_parts, n=2)
    hint = f" Did you mean {' or '.join(repr(name) for name in matches)}?" if matches else ""
    return EngineError(
        f"lora.{key} contains '{suffix}', but no linear layer in the decoder of {type(hf).__name__} has this name."
        f"{hint} Set lora.{key} to last parts of layer names ({', '.join(last_parts) or 'none'}) or to {ALL_LINEAR}"
    )


def _shapes(hf: PreTrainedModel, targets: Iterable[str], rank: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of the adapter's parameters by name, in the order of the model."""
    shapes: dict[str, tuple[int, int]] = {}
    for name in targets:
        layer: Any = hf.get_submodule(name)
        shapes[f"{name}.lora_A.{ADAPTER}.weight"] = (rank, layer.in_features)
        shapes[f"{name}.lora_B.{ADAPTER}.weight"] = (layer.out_features, rank)
    return shapes


# -- values -------------------------------------------------------------------------------------------


def _initial_values(shapes: Mapping[str, tuple[int, int]], seed: int) -> dict[str, Tensor]:
    """Sample the A matrices from PEFT's uniform initialization and set the B matrices to zero.

    Sampling runs on the CPU in float32, so that values are equal on all devices.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    values = {}
    for name, shape in shapes.items():
        values[name] = torch.zeros(shape, dtype=torch.float32, device="cpu")
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(values[name], a=math.sqrt(5), generator=generator)
    return values


def _load_adapter_tensors(
    folder: Path, hf: PreTrainedModel, config: LoRAConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Load the tensors of an adapter folder by parameter name; raise `EngineError` if they do not match the model."""
    folder = folder.expanduser()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise EngineError(
                f"lora.adapter_path={folder} has no {name}; set it to a folder written by PEFT's save_pretrained"
            )
    try:
        settings = read_json_object(folder / "adapter_config.json")
        tensors = load_file(folder / "adapter_model.safetensors")
    except (ValueError, SafetensorError) as error:
        raise EngineError(
            f"the adapter in lora.adapter_path={folder} cannot be read: {error}; save the adapter again"
        ) from error
    _check_settings(folder, settings, config)
    # As in a model folder, the head of a value model may be missing; the head of `hf` then keeps its values.
    heads = {name: tuple(parameter.shape) for name, parameter in hf.named_parameters() if _is_head_name(name)}
    weights = {_parameter_name(name): tensor for name, tensor in tensors.items()}
    stored, expected = _layers_in(weights), _layers_in(shapes)
    if stored and stored != expected:
        raise EngineError(
            f"lora.target_modules={config.target_modules} selects {len(expected)} layers "
            f"({', '.join(_last_parts(expected))}), but the adapter in {folder} has {len(stored)} "
            f"({', '.join(_last_parts(stored))}). They differ in {', '.join(sorted(expected ^ stored)[:4])}. "
            f"Set lora.target_modules={settings.get('target_modules')} and "
            f"lora.exclude_modules={settings.get('exclude_modules')}"
        )
    problems = [f"{name} is missing" for name in sorted(shapes.keys() - weights.keys())]
    problems += [f"{name} is unknown" for name in sorted(weights.keys() - shapes.keys() - heads.keys())]
    for name, shape in {**shapes, **heads}.items():
        if name in weights and tuple(weights[name].shape) != shape:
            problems.append(f"{name} has shape {tuple(weights[name].shape)}, not {shape}")
    if problems:
        listed = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise EngineError(
            f"the adapter in {folder} does not match this {type(hf).__name__}: {listed}; set lora.adapter_path to an "
            "adapter of this model"
        )
    return weights


def _check_settings(folder: Path, settings: Mapping[str, Any], config: LoRAConfig) -> None:
    """Raise `EngineError` if the settings of a stored adapter contradict `config` or are not those of standard LoRA."""
    if settings.get("peft_type") != "LORA":
        raise EngineError(
            f"the adapter in {folder} has peft_type={settings.get('peft_type')}, but only LORA is supported; set "
            "lora.adapter_path to a LoRA adapter"
        )
    for key, peft_key, value in (("rank", "r", config.rank), ("alpha", "lora_alpha", config.alpha)):
        if settings.get(peft_key) != value:
            raise EngineError(
                f"lora.{key}={_to_json_number(value)}, but the adapter in {folder} has "
                f"{peft_key}={settings.get(peft_key)}; set lora.{key}={settings.get(peft_key)}"
            )
    defaults = _import_peft().LoraConfig().to_dict()
    for key, value in settings.items():
        if key not in FREE_SETTINGS and value != defaults.get(key) and value not in (None, False, [], {}):
            raise EngineError(
                f"the adapter in {folder} has {key}={value}, which is not supported; train an adapter without {key}"
            )
    initialization = settings.get("init_lora_weights", True)
    if initialization not in SUPPORTED_INITIALIZATIONS:
        raise EngineError(
            f"the adapter in {folder} has init_lora_weights={initialization}, which also changes the base weights; "
            "convert it to standard LoRA with save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )


def _merge_layer(weight: Tensor, layer: Any, gather: GatherFn) -> Tensor:
    """Return the base weight plus the scaled product B A, in float32 or wider."""
    a, b = (gather(part[ADAPTER].weight.detach()) for part in (layer.lora_A, layer.lora_B))
    dtype = torch.promote_types(weight.dtype, torch.promote_types(a.dtype, torch.float32))
    return weight.to(dtype) + layer.scaling[ADAPTER] * (b.to(dtype) @ a.to(dtype))


# -- helpers ------------------------------------------------------------------------------------------


def _import_peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise EngineError(f"LoRA requires the package '{error.name}'; run: {install_command('peft')}") from error
    return peft


def _require_layers(hf: PreTrainedModel, caller: str) -> list[Any]:
    """Return the adapted layers; raise `EngineError` without an adapter."""
    layers = list(adapter_layers(hf).values())
    if not layers:
        raise EngineError(f"{caller} requires an adapter, but this model has no adapter; set EngineModel.lora")
    return layers


def _set_enabled(layers: Iterable[Any], enabled: bool) -> None:
    """Enable or disable adapter layers. PEFT also changes `requires_grad` of parameters, which is restored."""
    for layer in layers:
        trainable = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
        layer.enable_adapters(enabled)
        for parameter, flag in trainable:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)


def _is_adapter_name(name: str) -> bool:
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name


def _is_head_name(name: str) -> bool:
    return name.split(".")[0] in SCALAR_HEADS


def _parameter_name(name: str) -> str:
    """Convert a name in PEFT's file to a parameter name."""
    name = name.removeprefix(PREFIX)
    return name.replace(".lora_A.", f".lora_A.{ADAPTER}.").replace(".lora_B.", f".lora_B.{ADAPTER}.")


def _layers_in(names: Iterable[str]) -> set[str]:
    """Return the names of the layers that the adapter parameters `names` belong to."""
    return {name.rpartition(".lora_")[0] for name in names if _is_adapter_name(name)}


def _to_json_number(value: float) -> int | float:
    """Convert 16.0 to 16, because other readers of adapter_config.json expect alpha to be an integer."""
    return int(value) if float(value).is_integer() else value
