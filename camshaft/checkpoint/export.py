"""The finished model as a Hugging Face folder, from any engine's weights.

    check_export_path("out/huggingface")         # before a run: an error if something else is there
    export_hugging_face(
        engine.named_weights(), engine.config.model, "out/huggingface", check=Probe(engine.infer_batch)
    )

The folder is whole or not there, and before it appears `transformers` has loaded it once: a missing or unknown weight
ends the export, and so does one that has another digest, or a number that differs from the engine's own. Only an older
export is ever replaced. An adapter is part of the weights; given once more by itself, it is in the folder
`lora_adapter` inside, for PEFT. `export_adapter` writes a folder with the adapter and nothing else.
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
"""How far numbers may be apart, absolute below 1 and relative above; by what the less exact side computes in."""

PROBED_LENGTHS = (5, 2, 8)

FILE_BYTES = 4 << 30
"""A larger model is written as several files with an index."""

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Probe:
    """The engine's own numbers, to compare with those of the exported model."""

    run: Callable[[DataProto], Mapping[str, Any]]
    """Predictions for rows of tokens, as `infer_batch` of an engine gives them; every rank calls it."""
    dtype: str = "float32"
    """What the engine computes in, which can be less exact than its weights."""


def check_export_path(target: str | Path) -> None:
    """An error if `target` is there and is not an older export."""
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
    """`weights` with the config and the tokenizer of the folder `model.path`, and with its Python code if trusted.

    `adapter` are the names and tensors that PEFT has in its files; `tokenizer` is the folder of another one. Every rank
    of an engine calls this, since its weights and its numbers are gathered from all; one has `write` set.
    """
    folder, trusted = model_folder(model.path), model.trust_remote_code
    config = load_config(folder, trusted, model.override_config)
    together = _Together(weights, adapter, check, _rows(config))
    try:
        if write:
            _write(together, folder, config, model, Path(target), file_bytes, tokenizer or str(folder))
    finally:
        together.finish()


class _Together:
    """What all ranks do, in one order; an error of the rank that writes must not leave the others waiting in it."""

    def __init__(self, weights: Weights, adapter: Weights, check: Probe | None, rows: DataProto):
        self.weights, self.adapter = iter(weights), iter(adapter)
        self.check, self.rows = check, rows
        self._told: Mapping[str, Any] | None = None

    def finish(self) -> Mapping[str, Any]:
        """Take what is left of the weights; then the engine's numbers, if they are wanted, once."""
        for _ in itertools.chain(self.weights, self.adapter):
            pass
        if self._told is None:
            self._told = {}
            if self.check is not None:
                self._told = self.check.run(self.rows)
        return self._told


def export_adapter(
    weights: Weights, model: EngineModel, target: str | Path, check: Probe, tokenizer: str | None = None
) -> None:
    """The adapter that `model.lora` describes, as PEFT has it in its files, beside the tokenizer; from one process.

    PEFT loads it onto the weights of `model.path` before the folder appears.
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
            plain, held = load_adapter(base, work)
        _compare_weights(held, {name: _digest(tensor, dtype) for name, tensor in tensors.items()}, dtype, target)
        rows = _rows(config)
        _compare(plain, model.head, rows, check.run(rows)[OUTPUTS[model.head][0]], check.dtype, target)


def _write(
    together: _Together,
    folder: Path,
    config: PreTrainedConfig,
    model: EngineModel,
    target: Path,
    file_bytes: int,
    tokenizer: str,
) -> None:
    """Read from `folder` what is neither weights nor tokenizer."""
    check_export_path(target)
    trusted = model.trust_remote_code
    if model.head != "causal_lm":
        config.num_labels = 1
    with storage.new_folder(target, kind=KIND) as work:
        config.dtype, came = _write_weights(together.weights, work, file_bytes)
        config.save_pretrained(work)
        added = {name: tensor.detach().cpu() for name, tensor in together.adapter}
        with contextlib.suppress(OSError):  # a model without these files generates with its defaults
            (work / "generation_config.json").write_bytes((folder / "generation_config.json").read_bytes())
        load_tokenizer(tokenizer, trusted).save_pretrained(work)
        for code in folder.glob("*.py") if trusted else ():
            (work / code.name).write_bytes(code.read_bytes())
        if added and model.lora is not None:
            save_adapter(added.items(), work / ADAPTER, model.lora, str(folder.absolute()))
        plain = _loaded(work, target, trusted, model.head)
        held = {**dict(plain.named_buffers()), **dict(plain.named_parameters())}
        _compare_weights(held, came, config.dtype, target)
        config.architectures = [type(plain).__name__]
        config.save_pretrained(work)
        told = together.finish()
        if together.check is not None:
            numbers = told[OUTPUTS[model.head][0]]
            _compare(plain, model.head, together.rows, numbers, together.check.dtype, target)


def _write_weights(weights: Weights, work: Path, file_bytes: int) -> tuple[torch.dtype, dict[str, int]]:
    """In files of bounded size, one in memory at a time; the dtype of the first weight, and the digests of all."""
    file: dict[str, Tensor] = {}
    came: dict[str, int] = {}
    files: list[list[str]] = []
    total, dtype = 0, None

    def write() -> None:
        files.append(list(file))
        save_file(file, work / f"{len(files)}.safetensors", metadata={"format": "pt"})
        file.clear()

    for name, tensor in weights:
        if file and sum(held.nbytes for held in file.values()) + tensor.nbytes > file_bytes:
            write()
        file[name] = tensor.detach().cpu().contiguous()
        total, dtype = total + tensor.nbytes, dtype or tensor.dtype
        came[name] = _digest(tensor, dtype)
    write()
    assert dtype is not None, "a model without weights"
    if len(files) == 1:
        (work / "1.safetensors").rename(work / "model.safetensors")
        return dtype, came
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": {}}
    for number, names in enumerate(files, 1):
        own = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (work / f"{number}.safetensors").rename(work / own)
        index["weight_map"].update(dict.fromkeys(names, own))
    (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return dtype, came


def _loaded(work: Path, target: Path, trust_remote_code: bool, head: Head) -> Any:
    """What transformers makes of the folder, if it takes every weight."""
    # An engine that trains on finds the random state that its checkpoint holds.
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        model, info = CLASSES[head].from_pretrained(
            work, local_files_only=True, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    wrong = [f"{key} ({kind})" for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[kind]]
    if wrong:
        raise CheckpointError(f"{target}: transformers does not take the exported weights: {', '.join(wrong[:8])}")
    return model


def _digest(tensor: Tensor, dtype: torch.dtype) -> int:
    """Of the values in the number format of the export: some models keep a few weights wider than that."""
    return digest(tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _compare_weights(held: Mapping[str, Tensor], came: Mapping[str, int], dtype: torch.dtype, target: Path) -> None:
    """Is every weight, bit for bit, what was exported?"""
    wrong = [name for name, told in came.items() if name not in held or _digest(held[name], dtype) != told]
    if wrong:
        raise CheckpointError(f"{target}: loaded again, these weights are other ones: {', '.join(wrong[:8])}")


def _rows(config: PreTrainedConfig) -> DataProto:
    """A few rows of tokens, the same everywhere. None is the pad token, at which some heads take a row to end."""
    text = config.get_text_config()
    tokens = torch.randint(0, text.vocab_size, (sum(PROBED_LENGTHS),), generator=torch.Generator().manual_seed(0))
    if text.pad_token_id is not None:
        tokens[tokens == text.pad_token_id] = 1 if text.pad_token_id == 0 else text.pad_token_id - 1
    ids = Ragged(tokens, torch.tensor(PROBED_LENGTHS))
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() > 0)})


@torch.no_grad()
def _compare(model: Any, head: Head, rows: DataProto, told: Ragged | Tensor, dtype: str, target: Path) -> None:
    plain = torch.cat([_plain(model, ids, head) for ids in rows.ragged("input_ids").rows()])
    found = told.values[rows.ragged("loss_mask").values.to(told.values.device)] if isinstance(told, Ragged) else told
    off = float(((found.cpu() - plain).abs() / plain.abs().clamp(min=1)).max())
    allowed = max(TOLERANCES[dtype], TOLERANCES[str(model.dtype).removeprefix("torch.")])
    if not off <= allowed:
        raise CheckpointError(
            f"{target}: plain transformers gives other numbers than the engine with the exported weights: "
            f"{OUTPUTS[head][0]} are off by {off:.1e}, allowed {allowed:.0e}"
        )


def _plain(model: Any, ids: Tensor, head: Head) -> Tensor:
    """The head's numbers for one row by itself, of each token but the first, or of the row."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    if head == "reward":
        return logits
    if head == "value":
        return logits[:-1, 0]
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
