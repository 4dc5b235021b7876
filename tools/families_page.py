"""Write docs/families.md, the table of model families.

    python tools/families_page.py

The facts about the model types of transformers are those of `python -m tests.families.known`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from camshaft.config.backends import ENGINES  # noqa: E402
from camshaft.config.families.known import served_models, tested_transformers  # noqa: E402
from camshaft.config.families.support import INSTEAD, runs_padded, unsupported  # noqa: E402
from camshaft.config.families.table import (  # noqa: E402
    FEATURES_OF_ENGINES,
    HEADS,
    LIBRARIES,
    Family,
    Support,
    known_families,
    supporting,
)

NO = "-"
PAGE = ROOT / "docs" / "families.md"
MOST_USED = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma3_text", "gemma4_text", "phi3"),
    *("deepseek_v3", "glm4_moe", "olmo2", "granite", "cohere2", "smollm3", "gpt2", "opt"),
    *("gemma2", "gpt_oss", "qwen3_next", "qwen3_5_text"),
)
"""Types in the first table of the page."""
INTRODUCTION = """# Model families

This page shows what is supported for each decoder-only model type of transformers {version}. `make docs` generates it
from the code that rejects models, with the default config of each type. A config with other values can support more or
less: `camshaft engines explain --model PATH` prints the same for a model folder, and `--model TYPE` for a type.
A command rejects an unsupported model before it loads data or starts processes, with the reason.

- **engines**: the engines that train the type, with a language-model, a value and a reward head. `fsdp2` is the same as
  `fsdp`; `fsdp1` trains the same types, without tensor parallelism and LoRA.
- **TP, SP, PP, EP**: the engines that split the type by tensor, sequence, pipeline and expert parallelism. Sequence
  parallelism is Ulysses; Megatron calls it context parallelism. Ring attention is not implemented.
- **rows**: the form of a micro-batch for the engines `reference` and `fsdp`: packed rows without padding, or rows that
  are padded on the right.
- **prefix sharing**: a prompt that several responses share is computed once.
- **rollout `torch`**: the built-in generator. The rollouts `hf`, `vllm` and `sglang` generate with other types.
- **vLLM, SGLang**: the class is in the registry of vLLM {vllm} or SGLang {sglang}. The type was not run with them.
- **tested**: the command that trains tiny random models of the type on the engine `reference`, and compares losses,
  gradients and weights with transformers: `make test-families` with all heads, `make test` with a language-model and a
  value head. [Models](models.md) lists further tests.
"""


def page() -> str:
    """Return the page as Markdown."""
    families = known_families()
    trained = {name: family for name, family in families.items() if family.is_trained}
    refused = {name: family for name, family in families.items() if not family.is_trained}
    versions = {library: served_models()[library].version for library in LIBRARIES}
    parts = [
        INTRODUCTION.format(version=tested_transformers(), **versions),
        "## Most used families\n",
        _table(
            ("type", "engines", "TP", "SP", "PP", "EP", "LoRA", "prefix sharing", "rollout `torch`", "vLLM", "SGLang"),
            (_most_used_row(families[name]) for name in MOST_USED),
        ),
        "\nFor the families without engines, see [refused families](#refused-families).\n",
        f"## All {len(trained)} families\n",
        "The engines `reference` and `fsdp` train all of them. The columns TP, SP, LoRA and prefix sharing are those\n"
        "of `fsdp`; the table above has those of other engines.\n",
        _table(
            (
                *("type", "model", "rows", "other engines", "TP", "SP", "LoRA", "prefix sharing", "rollout `torch`"),
                *("vLLM", "SGLang", "tested"),
            ),
            map(_row, trained.values()),
        ),
        "\n## Families without tensor parallelism\n",
        _table(("reason", "types"), _grouped(_without_tensor_parallelism(trained.values()))),
        "\n## Refused families\n",
        "No engine trains the language model of these types. The table names the heads that are trained.\n",
        _table(
            ("type", "model", "they have", "instead", "heads that are trained", "vLLM", "SGLang"),
            map(_refused_row, refused.values()),
        ),
    ]
    return "\n".join(parts) + "\n"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(titles)}", *lines[1:]])


def _names(support: Support) -> str:
    """Return the engines that support a feature, for a cell."""
    names = supporting(support)
    return "all" if len(names) == len(support) else ", ".join(f"`{name}`" for name in names) or NO


def _yes(condition: bool) -> str:
    return "yes" if condition else NO


def _served(family: Family) -> list[str]:
    return [_yes(family.is_served(library)) for library in LIBRARIES]


def _most_used_row(family: Family) -> list[str]:
    features = ("language-model head", *FEATURES_OF_ENGINES)
    generates = not unsupported("packed rows", family.values)
    cells = [_names(family.support(feature)) for feature in features]
    return [f"`{family.model_type}`", *cells, _yes(generates), *_served(family)]


def _row(family: Family) -> list[str]:
    others = [name for name in supporting(family.support("language-model head")) if ENGINES[name].capabilities.families]
    known = family.known
    return [
        f"`{family.model_type}`",
        (known and known.checkpoint) or "",
        "padded" if runs_padded(family.values) else "packed",
        ", ".join(f"`{name}`" for name in others) or NO,
        *(_yes(not family.support(name)["fsdp"]) for name in ("tensor parallelism", "sequence parallelism", "LoRA")),
        _yes(not family.support("prefix sharing")["fsdp"]),
        _yes(not unsupported("packed rows", family.values)),
        *_served(family),
        f"`{known.tested}`" if known and known.tested else NO,
    ]


def _refused_row(family: Family) -> list[str]:
    heads = [head for head in HEADS if supporting(family.support(head))]
    instead = INSTEAD.get(family.model_type)
    return [
        f"`{family.model_type}`",
        (family.known and family.known.checkpoint) or "",
        "; ".join(family.reasons()),
        f"`{instead}`" if instead else NO,
        ", ".join(head.removesuffix(" head") for head in heads) or NO,
        *_served(family),
    ]


def _without_tensor_parallelism(families: Iterable[Family]) -> Iterator[tuple[str, str]]:
    """Yield the reason and the type of each family that `fsdp` does not split."""
    for family in families:
        if family.known and (reason := family.known.lacks.get("tensor parallelism")):
            yield reason, family.model_type


def _grouped(pairs: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    """Group the second parts of pairs by the first ones."""
    groups: dict[str, list[str]] = {}
    for reason, name in pairs:
        groups.setdefault(reason, []).append(f"`{name}`")
    return [(reason, ", ".join(names)) for reason, names in groups.items()]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
