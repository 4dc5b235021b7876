"""The finished model as a Hugging Face folder, from any engine's weights.

    check_export_path("out/huggingface")         # before a run: an error if something else is there
    export_hugging_face(engine.named_weights(), source="models/tiny", target="out/huggingface")

The folder is whole or not there, and before it appears `transformers` has loaded it once: a missing or
unknown weight ends the export. Only an older export is ever replaced.
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

KIND = "huggingface"


def check_export_path(target: str | Path) -> None:
    """An error if `target` is there and is not an older export."""
    storage.check_replaceable(target, KIND)


def export_hugging_face(
    weights: Iterable[tuple[str, Tensor]],
    source: str,
    target: str | Path,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> None:
    """`weights` with the config and the tokenizer of the folder `source`, and with its Python code if trusted."""
    check_export_path(target)
    folder = model_folder(source)
    config = load_config(folder, trust_remote_code, override_config or {})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    config.dtype = next(iter(tensors.values())).dtype
    with storage.new_folder(target, kind=KIND) as work:
        config.save_pretrained(work)
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        with contextlib.suppress(OSError):  # a model without these files generates with its defaults
            (work / "generation_config.json").write_bytes((folder / "generation_config.json").read_bytes())
        load_tokenizer(str(folder), trust_remote_code).save_pretrained(work)
        for code in folder.glob("*.py") if trust_remote_code else ():
            (work / code.name).write_bytes(code.read_bytes())
        _check(work, Path(target), trust_remote_code)


def _check(work: Path, target: Path, trust_remote_code: bool) -> None:
    with quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            work, local_files_only=True, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    info = loaded[1]
    wrong = [f"{key} ({kind})" for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[kind]]
    if wrong:
        raise CheckpointError(f"{target}: transformers does not take the exported weights: {', '.join(wrong[:8])}")
