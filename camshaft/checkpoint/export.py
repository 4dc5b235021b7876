"""Export of the weights of any engine as a Hugging Face folder.

    check_export_path("out/huggingface")         # before a run: raises an error if the path contains other files
    export_hugging_face(
        engine.named_weights(), engine.config.model, "out/huggingface", check=Probe(engine.infer_batch)
    )

The export is verified before the folder appears: `transformers` loads it, and the export fails if a weight is missing,
unknown or changed, or if the outputs differ from those of the engine. An existing folder is replaced only if it is an
older export. A LoRA adapter is merged into the weights, and can be written to the subfolder `lora_adapter` as well.
`export_adapter` exports only the adapter.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from camshaft import storage
from camshaft.config import EngineModel
from camshaft.config.engine import Head
from camshaft.dataproto import DataProto, Ragged
from camshaft.digest import digest
from camshaft.errors import CheckpointError
from camshaft.models import composite
from camshaft.models.classes import model_class
from camshaft.models.folders import complete_index, convert_model_errors
from camshaft.models.heads import default_output
from camshaft.models.loader import file_layout, load_config, load_tokenizer, model_folder, quiet_transformers
from camshaft.models.lora import load_adapter, save_adapter

KIND = "huggingface"

ADAPTER = "lora_adapter"

TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "bfloat16": 5e-2}
"""Maximum difference between the outputs of the engine and of transformers, by the lower-precision dtype of the two.

The difference is absolute for outputs below 1, and relative for larger outputs.
"""

PROBED_LENGTHS = (5, 2, 8)

FILE_BYTES = 4 << 30
"""Maximum size of a weight file in bytes. A larger model is split into several files with an index."""

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Probe:
    """Access to the outputs of the engine, with which the exported model is compared."""

    run: Callable[[DataProto], Mapping[str, Any]]
    """`infer_batch` of the engine. It is a collective call on all ranks."""
    dtype: str = "float32"
    """Dtype in which the engine computes. It can have a lower precision than the weights."""


def check_export_path(target: str | Path) -> None:
    """Raise an error if `target` exists and is not an export of this module."""
    storage.check_replaceable(target, KIND)


def export_hugging_face(
    weights: Weights,
    model: EngineModel,
    target: str | Path,
    check: Probe | None = None,
    write: bool = True,
    adapter: Weights = (),
    file_bytes: int = FILE_BYTES,
    tokenizer: str | None = None,
) -> None:
    """Export `weights` together with the config, the tokenizer and (if trusted) the Python code in `model.path`.

    All ranks of the engine must call this function, because weights and outputs are gathered collectively.

    Args:
        weights: Names and tensors of the complete model.
        model: Model of the engine.
        target: Folder to write.
        check: Engine whose outputs the exported model must reproduce. None skips this check.
        write: True on the one rank that writes the folder.
        adapter: Names and tensors of the LoRA adapter in the format of PEFT, for the subfolder `lora_adapter`.
        file_bytes: Maximum size of a weight file.
        tokenizer: Folder of the tokenizer. None uses `model.path`.
    """
    folder, trusted = model_folder(model.path), model.trust_remote_code
    config = load_config(folder, trusted, model.override_config)
    ranks = _Collective(weights, adapter, check, _rows(config))
    try:
        if write:
            _write(ranks, folder, config, model, Path(target), file_bytes, tokenizer or str(folder))
    finally:
        ranks.finish()


class _Collective:
    """Collective operations of the export. All ranks run all of them, even if the writing rank raises an error."""

    def __init__(self, weights: Weights, adapter: Weights, check: Probe | None, rows: DataProto):
        self.weights, self.adapter = iter(weights), iter(adapter)
        self.check, self.rows = check, rows
        self._predictions: Mapping[str, Any] | None = None

    def finish(self) -> Mapping[str, Any]:
        """Consume the remaining weights, and return the engine's outputs for the probe rows, computed once."""
        for _ in itertools.chain(self.weights, self.adapter):
            pass
        if self._predictions is None:
            self._predictions = {}
            if self.check is not None:
                self._predictions = self.check.run(self.rows)
        return self._predictions


def export_adapter(
    weights: Weights, model: EngineModel, target: str | Path, check: Probe, tokenizer: str | None = None
) -> None:
    """Export only the LoRA adapter, in the format of PEFT, together with the tokenizer.

    A single process must hold all weights. Before the folder appears, PEFT loads the adapter onto the weights in
    `model.path`, and its weights and outputs are compared with those of the engine.
    """
    assert model.lora is not None
    check_export_path(target)
    folder, target, tensors = model_folder(model.path), Path(target), dict(weights)
    dtype = next(iter(tensors.values())).dtype
    config = load_config(folder, model.trust_remote_code, model.override_config)
    with storage.new_folder(target, kind=KIND) as work:
        save_adapter(tensors.items(), work, model.lora, str(folder.absolute()))
        load_tokenizer(tokenizer or str(folder), model.trust_remote_code).save_pretrained(work)
        if model.head != "causal_lm":
            config.num_labels = 1
        with quiet_transformers():
            errors = convert_model_errors(folder, config.model_type, model.head)
            with errors, complete_index(folder) as readable:
                base = model_class(config, model.head).from_pretrained(
                    readable,
                    config=config,
                    dtype=check.dtype,
                    trust_remote_code=model.trust_remote_code,
                    key_mapping=composite.key_mapping(folder),
                )
            loaded, weights_loaded = load_adapter(base, work)
        digests = {name: _digest(tensor, dtype) for name, tensor in tensors.items()}
        _compare_weights(weights_loaded, digests, dtype, target)
        rows = _rows(config)
        _compare(loaded, model.head, rows, check.run(rows)[default_output(model.head)], check.dtype, target)


def _write(
    ranks: _Collective,
    folder: Path,
    config: PreTrainedConfig,
    model: EngineModel,
    target: Path,
    file_bytes: int,
    tokenizer: str,
) -> None:
    """Write the export and verify it. The config and the Python code are read from `folder`."""
    check_export_path(target)
    trusted = model.trust_remote_code
    if model.head != "causal_lm":
        config.num_labels = 1
    with storage.new_folder(target, kind=KIND) as work:
        keeps_parts = model.head == "causal_lm" and composite.is_composite(folder)
        layout = file_layout(config, trusted, model.head, folder if keeps_parts else None)
        kept, full_config = composite.other_weights(folder) if keeps_parts else iter(()), config
        for file in folder.glob("*processor_config.json") if keeps_parts else ():
            (work / file.name).write_bytes(file.read_bytes())
        config.dtype, digests = _write_weights(ranks.weights, work, file_bytes, layout, kept)
        if keeps_parts:
            full_config = composite.full_config(folder, config)
        full_config.save_pretrained(work)
        added = {name: tensor.detach().cpu() for name, tensor in ranks.adapter}
        with contextlib.suppress(OSError):  # generation_config.json is optional
            (work / "generation_config.json").write_bytes((folder / "generation_config.json").read_bytes())
        load_tokenizer(tokenizer, trusted).save_pretrained(work)
        for code in folder.glob("*.py") if trusted else ():
            (work / code.name).write_bytes(code.read_bytes())
        if added and model.lora is not None:
            save_adapter(added.items(), work / ADAPTER, model.lora, str(folder.absolute()))
        loaded = _load(work, target, trusted, model.head)
        weights = {**dict(loaded.named_buffers()), **dict(loaded.named_parameters())}
        _compare_weights(weights, digests, config.dtype, target)
        config.architectures = [type(loaded).__name__]
        full_config.save_pretrained(work)
        predictions = ranks.finish()
        if ranks.check is not None:
            outputs = predictions[default_output(model.head)]
            _compare(loaded, model.head, ranks.rows, outputs, ranks.check.dtype, target)


def _write_weights(
    weights: Weights,
    work: Path,
    file_bytes: int,
    layout: Callable[[str, Tensor], Mapping[str, Tensor]],
    kept: Weights = (),
) -> tuple[torch.dtype, dict[str, int]]:
    """Write the weights to files of limited size, and return the dtype of the first weight and all checksums.

    Only the weights of one file are in memory at a time. `kept` are written unchanged, without a checksum.
    """
    file: dict[str, Tensor] = {}
    digests: dict[str, int] = {}
    files: list[list[str]] = []
    total, dtype = 0, None

    def write() -> None:
        files.append(list(file))
        try:
            save_file(file, work / f"{len(files)}.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(
                f"{work.parent}: the weights cannot be written ({error}); free space on the disk, or export to a "
                "folder on another disk"
            ) from error
        file.clear()

    def add(parts: Mapping[str, Tensor]) -> int:
        size = sum(part.nbytes for part in parts.values())
        if file and sum(weight.nbytes for weight in file.values()) + size > file_bytes:
            write()
        file.update((key, part.contiguous()) for key, part in parts.items())
        return size

    for name, tensor in weights:
        total, dtype = total + add(layout(name, tensor.detach().cpu())), dtype or tensor.dtype
        digests[name] = _digest(tensor, dtype)
    for name, tensor in kept:
        total += add({name: tensor})
    write()
    assert dtype is not None, "a model without weights"
    if len(files) == 1:
        (work / "1.safetensors").rename(work / "model.safetensors")
        return dtype, digests
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": {}}
    for number, names in enumerate(files, 1):
        file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (work / f"{number}.safetensors").rename(work / file_name)
        index["weight_map"].update(dict.fromkeys(names, file_name))
    (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return dtype, digests


def _load(work: Path, target: Path, trust_remote_code: bool, head: Head) -> Any:
    """Load the folder with transformers; raise an error if weights are missing, unknown or of the wrong shape."""
    # Restore the random state, because initializing the model must not affect the rest of the run.
    config = load_config(work, trust_remote_code, {})
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        model, info = model_class(config, head).from_pretrained(
            work,
            config=config,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            key_mapping=composite.key_mapping(work),
        )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    kept = composite.OTHER_PARTS.match if composite.is_composite(work) else lambda _: False
    rejected = [f"{key} ({kind})" for kind in kinds for key in info[kind] if not kept(str(key))]
    if rejected:
        raise CheckpointError(f"{target}: transformers rejects exported weights: {', '.join(rejected[:8])}")
    return model


def _digest(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the checksum of a tensor converted to `dtype`, because transformers loads some weights in float32."""
    return digest(tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _compare_weights(
    weights: Mapping[str, Tensor], digests: Mapping[str, int], dtype: torch.dtype, target: Path
) -> None:
    """Raise CheckpointError if a loaded weight differs from the exported one."""
    changed = [
        name for name, expected in digests.items() if name not in weights or _digest(weights[name], dtype) != expected
    ]
    if changed:
        raise CheckpointError(f"{target}: these weights differ after loading: {', '.join(changed[:8])}")


def _rows(config: PreTrainedConfig) -> DataProto:
    """Return a few fixed rows of tokens for the comparison of outputs.

    They do not contain the pad token, because some heads interpret it as the end of a row.
    """
    text_config = config.get_text_config()
    vocab_size, pad = text_config.vocab_size, text_config.pad_token_id
    tokens = torch.randint(0, vocab_size, (sum(PROBED_LENGTHS),), generator=torch.Generator().manual_seed(0))
    if pad is not None:
        tokens[tokens == pad] = 1 if pad == 0 else pad - 1
    ids = Ragged(tokens, torch.tensor(PROBED_LENGTHS))
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() > 0)})


@torch.no_grad()
def _compare(model: Any, head: Head, rows: DataProto, outputs: Ragged | Tensor, dtype: str, target: Path) -> None:
    expected = torch.cat([_transformers_outputs(model, ids, head) for ids in rows.ragged("input_ids").rows()])
    if isinstance(outputs, Ragged):
        outputs = outputs.values[rows.ragged("loss_mask").values.to(outputs.values.device)]
    difference = float(((outputs.cpu() - expected).abs() / expected.abs().clamp(min=1)).max())
    tolerance = max(TOLERANCES[dtype], TOLERANCES[str(model.dtype).removeprefix("torch.")])
    if not difference <= tolerance:
        raise CheckpointError(
            f"{target}: with the exported weights, the {default_output(head)} of transformers and of the engine "
            f"differ by {difference:.1e}, which exceeds the tolerance of {tolerance:.0e}"
        )


def _transformers_outputs(model: Any, ids: Tensor, head: Head) -> Tensor:
    """Return the outputs for one row: one per token except the first, or a single one for a reward head."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    if head == "reward":
        return logits
    if head == "value":
        return logits[:-1, 0]
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
