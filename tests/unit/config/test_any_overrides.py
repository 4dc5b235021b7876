"""Property tests: any overrides or file contents give a config, or a `ConfigError` that names the error.

CAMSHAFT_CONFIG_CASES=10000 python -m pytest --timeout 0 tests/unit/config/test_any_overrides.py    # otherwise 30
"""

import contextlib
import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings

from camshaft.config import (
    EvalConfig,
    GenerateConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    compose,
    load_eval,
    load_generate,
    load_ppo,
    load_rm,
    load_sft,
)
from camshaft.config.defaults import raw_defaults
from camshaft.config.schema.aliases import ALIASES
from camshaft.config.tree import fields, put
from camshaft.errors import ConfigError
from camshaft.masking import printable

CASES = int(os.environ.get("CAMSHAFT_CONFIG_CASES", "30"))
"""Number of examples of all tests in this file."""


def share(part: float) -> Callable[[Any], Any]:
    return settings(
        max_examples=max(1, int(CASES * part)),
        deadline=timedelta(seconds=120),  # no hang, even on a busy machine
        derandomize="CAMSHAFT_CONFIG_CASES" not in os.environ,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


LOADERS: dict[Any, Callable[..., Any]] = {
    PPOConfig: load_ppo,
    SFTConfig: load_sft,
    RMConfig: load_rm,
    GenerateConfig: load_generate,
    EvalConfig: load_eval,
}
SCHEMAS = st.sampled_from(list(LOADERS))


@pytest.fixture
def right(words: list[str], sft_words: list[str], tmp_path: Path) -> Mapping[Any, list[str]]:
    """Return valid overrides for each command."""
    files = [f"data.path={tmp_path}/val.parquet"]
    generate = [*files, f"data.output_path={tmp_path}/out", f"model.path={tmp_path}/model", "trainer.device=cpu"]
    return {PPOConfig: words, SFTConfig: sft_words, RMConfig: sft_words, GenerateConfig: generate, EvalConfig: files}


# -- valid and invalid overrides ------------------------------------------------------------------

PLAIN = [
    *("true", "false", "null", "-1", "0", "1", "2", "3", "4", "7", "8", "0.5", "1e-6", "100", "512", "1024", "1000003"),
    *("fsdp", "fsdp1", "reference", "vllm", "torch", "server", "sglang", "process", "hf", "grpo", "gae", "remax"),
    *("gspo", "full", "token", "sequence", "auto", "disable", "resume_path", "drop", "cpu", "ray", "local", "left"),
    *("float32", "bf16", "cosine", "selective", "seq-mean-token-mean", "adapter", "all-linear", "format", "seq_k1"),
    *("1000000007", "99999999999999999999", "[model,optimizer,extra]", "[console,wandb]", "{pattern: '('}", "pkg:C"),
]  # fmt: skip
"""Values that are valid for some key."""
HUGE = [str(10**18), "9" * 400, "-" + "9" * 400, "9" * 5000, "1e400", "-1e999", "1e-400", "0x" + "f" * 40]
ODD = [
    *("", " ", "null", "None", "~", "true", "True", "yes", "-1", "0", "1", "2", "3", "-0.0", "2.5", "7", "512", "nan"),
    *("inf", "-inf", "1_000", "007", "1e-6", "1:30", "2020-01-01", "+1", "?", "???", "'", '"', "'a", "\\", "a\\", "@x"),
    *("[]", "[1]", "[a,b]", "[[1],2]", "[null]", "[", "]", "{}", "{a: 1}", "{a: {b: [1, 2]}}", "{1: 2}", "{null: 1}"),
    *("${trainer.seed}", "${nope}", "${trainer}", "${.seed}", "${..data}", "${data.path}", "${", "}", "${}", "a$b"),
    *("${oc.env:HOME}", "${oc.env:NOPE}", "${oc.env:NOPE,1}", "${oc.decode:'['}", "${oc.create:{a: 1}}", "${oh:1}"),
    *("${oc.select:trainer.seed}", "${oc.dict.keys:trainer}", "[${trainer.seed}]", "{a: ${nope}}", "a ${b} c"),
    *("range(1,3)", "choice(1,2)", "glob(*)", "shuffle(1,2)", "sort(3,1)", "int(2)", "str([])", "json_str({})", "1,2"),
    *("cpu", "fsdp", "reference", "megatron", "vllm", "torch", "server", "sglang", "grpo", "gae", "remax", "gspo"),
    *("pkg.mod:Class", "pkg:", ":x", "a.b:c.d", "auto", "ray", "wandb", "resume_path", "drop", "full", "token", "seq"),
    *("/", ".", "..", "/etc/passwd", "/proc/self/mem", "/nowhere/x.py", "file://", "file:///x", "s3://b/k", "hdfs://"),
    *("~/x", "~nobody-of-this-name/x", "*", "**", "[x", "a/b", "org/model", "//", "http://h:x/", "http://", "://"),
    *("caf\u00e9", "\u65e5\u672c", "\U0001f600", "\udce9", "\x00", "a\x00b", "\n", "a\nb: 1", "\x1b[31m", "a" * 5000),
    *("[" * 9 + "]" * 9, "[" * 3000 + "]" * 3000, "{a:" * 9 + "1" + "}" * 9, "{a:" * 2000 + "1" + "}" * 2000, "(" * 50),
    *("${" * 50 + "a" + "}" * 50, "${oc.env:" * 30 + "A" + "}" * 30),
    *HUGE,
]  # fmt: skip
trees = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=5), st.sampled_from(ODD)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
values = st.one_of(
    st.sampled_from([*PLAIN * 4, *ODD]), st.sampled_from(PLAIN), st.text(max_size=8), trees.map(json.dumps)
)
ENDS = [
    *("s", ".x", "..x", ".x.y.z", "[0]", "@pkg", ".", " ", "/x", ".caf\u00e9", ".0", ".null", "\\=", ":1", "'"),
    "." + "x" * 3000,
]
OTHERS = ["hydra.run.dir", "hydra", "defaults", "hydra/job_logging", "_self_", "_target_"]


@st.composite
def keys(draw: st.DrawFn, schema: Any) -> str:
    """Draw a key, an alias, or something similar."""
    key = draw(st.sampled_from(sorted(fields(schema))))
    kind = draw(st.sampled_from(["known"] * 20 + ["older", "elsewhere", "end", "end", "cut", "swap", "deep", "text"]))
    match kind:
        case "older":
            return draw(st.sampled_from(sorted(ALIASES)))
        case "elsewhere":
            return draw(st.sampled_from(OTHERS))
        case "end":
            return key + draw(st.sampled_from(ENDS))
        case "cut":
            return key[: draw(st.integers(0, len(key)))]
        case "swap":
            at = draw(st.integers(0, len(key) - 1))
            return key[:at] + draw(st.sampled_from(["", "x", ".", "_", "\u00e9", "-", " "])) + key[at + 1 :]
        case "deep":
            return ".".join([key] * draw(st.integers(2, 40)))
        case "text":
            return draw(st.text(max_size=12))
    return key


@dataclass
class Typed:
    """An override and its key."""

    word: str
    key: str


def words_of(schema: Any) -> st.SearchStrategy[Typed]:
    marks = st.sampled_from([""] * 20 + ["+", "++", "~", "~~", "+++", "-", "--"])
    signs = st.sampled_from(["="] * 40 + ["", " = ", "==", ":=", "+="])
    typed = st.builds(
        lambda mark, key, sign, value: Typed(mark + key + (sign + value if sign else ""), key),
        marks, keys(schema), signs, values,
    )  # fmt: skip
    text = st.text(max_size=12).map(lambda text: Typed(text, text))
    return st.integers(0, 9).flatmap(lambda number: typed if number else text)


def named(typed: Typed, message: str) -> bool:
    """Return True if the message contains the override, its key, a section of the key, or the key of an alias."""
    parts = typed.key.lstrip("+").split(".")
    heads = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    names = (typed.word[:300], *heads, *(ALIASES[head] for head in heads if head in ALIASES))
    return any(name in message or printable(name) in message for name in names)


# -- results --------------------------------------------------------------------------------------


def wrong(schema: Any, words: list[str], **where: str) -> str | None:
    """Return the message of the error, or None."""
    try:
        LOADERS[schema](words, **where)
    except ConfigError as error:
        return str(error)
    return None


@share(0.4)
@given(data=st.data(), schema=SCHEMAS)
def test_any_override_gives_a_config_or_names_the_error(data: st.DataObject, schema: Any, right) -> None:
    typed = data.draw(words_of(schema))
    message = wrong(schema, [*right[schema], typed.word])
    assert message is None or named(typed, message)
    assert message is None or len(message) < 3000
    assert message is None or not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", message)


@share(0.2)
@given(data=st.data(), schema=SCHEMAS)
def test_any_overrides_give_a_config_or_an_error(data: st.DataObject, schema: Any, right) -> None:
    typed = data.draw(st.lists(words_of(schema), min_size=2, max_size=6))
    assert wrong(schema, [*right[schema], *(one.word for one in typed)]) != ""


@share(0.1)
@given(data=st.data(), schema=SCHEMAS)
def test_any_command_line_gives_configs_or_an_error(data: st.DataObject, schema: Any, right) -> None:
    typed = data.draw(st.lists(words_of(schema).filter(lambda one: not one.word.startswith("-")), max_size=3))
    words = [*right[schema], *(one.word for one in typed)]
    with contextlib.suppress(ConfigError):
        compose(words, schema)


names = st.sampled_from(
    ["data", "trainer", "seed", "path", "model", "defaults", "hydra", "a", "", "a.b", "???", "${x}"]
)
file_keys = st.one_of(names, names, st.integers(-2, 2), st.none(), st.booleans(), st.text(max_size=3))
file_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.dates(), st.datetimes(),
        st.binary(max_size=4), st.sampled_from(ODD), st.sampled_from(PLAIN),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(file_keys, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@st.composite
def files(draw: st.DrawFn, schema: Any) -> Any:
    """Draw defaults with some values replaced, a subset of their keys, or an arbitrary tree."""
    tree: Any = copy.deepcopy(draw(st.sampled_from([{}, {}, raw_defaults(schema)])))
    for key in draw(st.lists(keys(schema), max_size=4)):
        value = draw(file_values)
        if draw(st.integers(0, 3)):
            put(tree, key, value)
        else:
            tree[key] = value
    return tree if draw(st.integers(0, 9)) else draw(file_values)


@share(0.2)
@given(data=st.data(), schema=SCHEMAS)
def test_any_file_gives_a_config_or_an_error(data: st.DataObject, schema: Any, right, tmp_path: Path) -> None:
    text = yaml.safe_dump(data.draw(files(schema)), allow_unicode=True)
    (tmp_path / "mine.yaml").write_text(text, "utf-8", "surrogateescape")
    assert wrong(schema, right[schema], config_dir=str(tmp_path), config_name="mine") != ""


TEXTS = [b"data: {train_batch_size: 512}\ntrainer.seed: 4\n", b"defaults: [ppo_trainer, _self_]\n", b""]
MARKS = [b": ", b"&a ", b"*a", b"!!int ", b"- ", b"\t"]


@share(0.1)
@example(content=b"a: &a [*a]", schema=PPOConfig)
@example(content=b"trainer: &a {seed: *a}", schema=PPOConfig)
@example(content=b"{" * 1000, schema=EvalConfig)
@example(content=b".data: {train_batch_size: 512}", schema=PPOConfig)
@given(
    content=st.builds(
        lambda text, at, more: text[:at] + more + text[at:],
        st.sampled_from(TEXTS),
        st.integers(0, 40),
        st.binary(max_size=4) | st.text(max_size=4).map(str.encode) | st.sampled_from(MARKS),
    ),
    schema=SCHEMAS,
)
def test_any_bytes_give_a_config_or_an_error(content: bytes, schema: Any, right, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    assert wrong(schema, right[schema], config_dir=str(tmp_path), config_name="mine") != ""
