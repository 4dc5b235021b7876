"""Export of the weights of any engine as a Hugging Face folder.

    check_export_path("out/huggingface")         # before a run: raises if the path is taken
    export_hugging_face(
        engine.named_weights(), engine.config.model, "out/huggingface", check=Probe(engine.infer_batch)
    )

The folder appears atomically, after `transformers` has loaded it: a missing or unknown weight, a weight with another
checksum, or an output that differs from the engine's raises an error. Only an older export is replaced. A LoRA adapter
is merged into the weights; it can also be written to the subfolder `lora_adapter`, for PEFT. `export_adapter` writes a
folder with only the adapter.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from camshaft import storage
from camshaft.config import EngineModel
from camshaft.dataproto import DataProto, Ragged
from camshaft.digest import digest
from camshaft.errors import CheckpointError
from camshaft.models.loader import CLASSES, load_config, load_tokenizer, model_folder, quiet_transformers
from camshaft.models.lora import load_adapter, save_adapter
from camshaft.models.packed import OUTPUTS, Head

KIND = "huggingface"

ADAPTER = "lora_adapter"

TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "bfloat16": 5e-2}
"""Allowed difference of outputs, absolute below 1 and relative above, by the narrower compute dtype."""

PROBED_LENGTHS = (5, 2, 8)

FILE_BYTES = 4 << 30
"""Maximum size of a weight file; larger models become several files with an index."""

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Probe:
    """The engine, whose outputs are compared with those of the exported model."""

    run: Callable[[DataProto], Mapping[str, Any]]
    """`infer_batch` of the engine; every rank calls it."""
    dtype: str = "float32"
    """Compute dtype of the engine, which can be narrower than that of its weights."""


def check_export_path(target: str | Path) -> None:
    """Raise an error if `target` exists and is not an older export."""
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
    """Export `weights` with the config and the tokenizer of the folder `model.path`, and its Python code if trusted.

    `adapter` yields names and tensors in the format of PEFT; `tokenizer` is the folder of another tokenizer. Every rank
    of an engine calls this function, because weights and outputs are gathered from all ranks; one rank has `write` set.
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
    """The collective operations of the export; all ranks run them even if the writing rank raises an error."""

    def __init__(self, weights: Weights, adapter: Weights, check: Probe | None, rows: DataProto):
        self.weights, self.adapter = iter(weights), iter(adapter)
        self.check, self.rows = check, rows
        self._predictions: Mapping[str, Any] | None = None

    def finish(self) -> Mapping[str, Any]:
        """Consume the remaining weights and run the engine on the probe rows, once."""
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
    """Export only the adapter `model.lora` in the format of PEFT, with the tokenizer, from one process.

    Before the folder appears, PEFT loads it onto the weights of `model.path`.
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
            base = CLASSES[model.head].from_pretrained(
                folder, config=config, dtype=check.dtype, trust_remote_code=model.trust_remote_code
            )
            loaded, weights_loaded = load_adapter(base, work)
        _compare_weights(
            weights_loaded, {name: _digest(tensor, dtype) for name, tensor in tensors.items()}, dtype, target
        )
        rows = _rows(config)
        _compare(loaded, model.head, rows, check.run(rows)[OUTPUTS[model.head][0]], check.dtype, target)


def _write(
    ranks: _Collective,
    folder: Path,
    config: PreTrainedConfig,
    model: EngineModel,
    target: Path,
    file_bytes: int,
    tokenizer: str,
) -> None:
    """Write and verify the export; config and code come from `folder`."""
    check_export_path(target)
    trusted = model.trust_remote_code
    if model.head != "causal_lm":
        config.num_labels = 1
    with storage.new_folder(target, kind=KIND) as work:
        config.dtype, digests = _write_weights(ranks.weights, work, file_bytes)
        config.save_pretrained(work)
        added = {name: tensor.detach().cpu() for name, tensor in ranks.adapter}
        with contextlib.suppress(OSError):  # the file is optional
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
        config.save_pretrained(work)
        predictions = ranks.finish()
        if ranks.check is not None:
            outputs = predictions[OUTPUTS[model.head][0]]
            _compare(loaded, model.head, ranks.rows, outputs, ranks.check.dtype, target)


def _write_weights(weights: Weights, work: Path, file_bytes: int) -> tuple[torch.dtype, dict[str, int]]:
    """Write files of bounded size, one in memory at a time; returns the dtype of the first weight and all checksums."""
    file: dict[str, Tensor] = {}
    digests: dict[str, int] = {}
    files: list[list[str]] = []
    total, dtype = 0, None

    def write() -> None:
        files.append(list(file))
        save_file(file, work / f"{len(files)}.safetensors", metadata={"format": "pt"})
        file.clear()

    for name, tensor in weights:
        if file and sum(weight.nbytes for weight in file.values()) + tensor.nbytes > file_bytes:
            write()
        file[name] = tensor.detach().cpu().contiguous()
        total, dtype = total + tensor.nbytes, dtype or tensor.dtype
        digests[name] = _digest(tensor, dtype)
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
    """Load the folder with transformers; raises an error unless it takes every weight."""
    # Restores the random state, so that a run that continues is not affected.
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        model, info = CLASSES[head].from_pretrained(
            work, local_files_only=True, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    wrong = [f"{key} ({kind})" for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[kind]]
    if wrong:
        raise CheckpointError(f"{target}: transformers rejects exported weights: {', '.join(wrong[:8])}")
    return model


def _digest(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the checksum in the dtype of the export; some models keep a few weights in a wider dtype."""
    return digest(tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _compare_weights(
    weights: Mapping[str, Tensor], digests: Mapping[str, int], dtype: torch.dtype, target: Path
) -> None:
    """Check that every loaded weight has the checksum of the exported one."""
    wrong = [
        name for name, expected in digests.items() if name not in weights or _digest(weights[name], dtype) != expected
    ]
    if wrong:
        raise CheckpointError(f"{target}: these weights differ after loading: {', '.join(wrong[:8])}")


def _rows(config: PreTrainedConfig) -> DataProto:
    """Return a few fixed rows of tokens, without the pad token, at which some heads end a row."""
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
    off = float(((outputs.cpu() - expected).abs() / expected.abs().clamp(min=1)).max())
    allowed = max(TOLERANCES[dtype], TOLERANCES[str(model.dtype).removeprefix("torch.")])
    if not off <= allowed:
        raise CheckpointError(
            f"{target}: with the exported weights, the {OUTPUTS[head][0]} of transformers and of the engine differ by "
            f"{off:.1e}, allowed {allowed:.0e}"
        )


def _transformers_outputs(model: Any, ids: Tensor, head: Head) -> Tensor:
    """Return the head's outputs for one row: of every token except the first, or of the row."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    if head == "reward":
        return logits
    if head == "value":
        return logits[:-1, 0]
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
