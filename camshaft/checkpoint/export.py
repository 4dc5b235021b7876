"""The finished model as a Hugging Face folder, from any engine's weights.

    export_hugging_face(engine.named_weights(), source="models/tiny", target="out/huggingface")

The folder is whole or not there, and before it appears `transformers` has loaded it once: a missing or
unknown weight ends the export.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft import storage
from camshaft.errors import CheckpointError
from camshaft.models.loader import load_config, load_tokenizer, model_folder, quiet_transformers


def export_hugging_face(
    weights: Iterable[tuple[str, Tensor]],
    source: str,
    target: str | Path,
    override_config: Mapping[str, Any] | None = None,
) -> None:
    """`weights` with the config and the tokenizer of the folder `source`."""
    folder = model_folder(source)
    config = load_config(folder, False, override_config or {})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    config.dtype = next(iter(tensors.values())).dtype
    with storage.new_folder(target, kind="huggingface") as work:
        config.save_pretrained(work)
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        with contextlib.suppress(OSError):  # a model without these files generates with its defaults
            (work / "generation_config.json").write_bytes((folder / "generation_config.json").read_bytes())
        load_tokenizer(str(folder)).save_pretrained(work)
        _check(work, Path(target))


def _check(work: Path, target: Path) -> None:
    with quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(work, local_files_only=True, output_loading_info=True)
    info = loaded[1]
    wrong = [f"{key} ({kind})" for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[kind]]
    if wrong:
        raise CheckpointError(f"{target}: transformers does not take the exported weights: {', '.join(wrong[:8])}")
