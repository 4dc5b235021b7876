"""Write the architectures in the registries of the tested vLLM and SGLang: `camshaft/config/families/served.json`.

    python tools/served_models.py vllm 0.32.0 .venv-vllm/lib/python3.11/site-packages/vllm
    python tools/served_models.py sglang 0.5.23 .venv-sglang/lib/python3.11/site-packages/sglang

The source of the packages is parsed, not imported.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

SERVED = Path(__file__).parents[1] / "camshaft" / "config" / "families" / "served.json"
VLLM_TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
"""Tables of generative models in vLLM's registry."""


def vllm_architectures(package: Path) -> Iterator[str]:
    """Yield the keys of the tables of vLLM's registry."""
    for name, value in _assignments(package / "model_executor" / "models" / "registry.py"):
        if name in VLLM_TABLES and isinstance(value, ast.Dict):
            yield from (key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def sglang_architectures(package: Path) -> Iterator[str]:
    """Yield the classes that SGLang's modules of models register as `EntryClass`."""
    for file in sorted((package / "srt" / "models").rglob("*.py")):
        for name, value in _assignments(file):
            if name == "EntryClass":
                yield from (node.id for node in ast.walk(value) if isinstance(node, ast.Name))


def _assignments(file: Path) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names and values that a module assigns."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))


def main(library: str, version: str, package: str) -> None:
    find = {"vllm": vllm_architectures, "sglang": sglang_architectures}[library]
    content = json.loads(SERVED.read_text(encoding="utf-8")) if SERVED.exists() else {}
    content[library] = {"version": version, "architectures": sorted(set(find(Path(package))))}
    SERVED.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
