"""The most used types, and two on right-padded rows, equal transformers; types are refused for the stated reasons.

`make test-families` checks all types, with all heads.
"""

import json
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from camshaft.config.engine import Head
from camshaft.config.families.known import KNOWN, complete_values, served_models
from camshaft.config.families.support import INSTEAD, OWN_ATTENTION, RECURRENT, text_values, unsupported
from camshaft.rollout.sglang import installed as sglang
from camshaft.rollout.vllm import installed as vllm

from .checks import check_head, refusal, write_model
from .configs import MOST_USED, PADDED, decoder_types, tiny_config
from .known import known_types
from .refused import REFUSED


@pytest.mark.parametrize("head", ["causal_lm", "value"])
@pytest.mark.parametrize("model_type", MOST_USED + PADDED)
def test_training_equals_transformers(model_type: str, head: Head, tmp_path: Path) -> None:
    write_model(model_type, tmp_path)
    outcome = check_head(tmp_path, head)
    assert outcome.status == "equal", outcome.detail


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_types_are_refused_for_the_stated_reason(model_type: str, tmp_path: Path) -> None:
    assert REFUSED[model_type] in (refusal(model_type, tmp_path) or "accepted")


@pytest.mark.parametrize("model_type", decoder_types())
def test_refusals_are_known_from_the_config(model_type: str) -> None:
    values = text_values(tiny_config(model_type).to_dict())
    reasons = " and ".join([*unsupported("training", values), *unsupported("fused log-probs", values)])
    assert REFUSED.get(model_type, "") in reasons
    assert bool(reasons) == (model_type in REFUSED)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
def test_types_without_the_attention_interface_are_those_of_transformers() -> None:
    classes = {name: getattr(transformers, cls) for name, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    assert set(RECURRENT) == {name for name, cls in classes.items() if cls._is_stateful}
    others = {name for name, cls in classes.items() if not cls.is_backend_compatible()}
    assert set(OWN_ATTENTION) == others - set(RECURRENT)


def test_refused_types_are_known_without_a_complete_config() -> None:
    for model_type in decoder_types():
        values = complete_values({"model_type": model_type})
        reasons = [*unsupported("training", values), *unsupported("fused log-probs", values)]
        assert bool(reasons) == (model_type in REFUSED), model_type


def test_another_family_is_named_for_each_refused_type() -> None:
    assert REFUSED.keys() <= INSTEAD.keys()
    assert not REFUSED.keys() & set(INSTEAD.values())


def test_the_facts_about_all_types_are_up_to_date() -> None:
    facts = json.loads(json.dumps(known_types()))
    assert facts == json.loads(KNOWN.read_text(encoding="utf-8"))["types"], "run: make docs"


def test_served_models_are_those_of_the_tested_versions() -> None:
    tested = {"vllm": vllm.TESTED, "sglang": sglang.TESTED}
    assert {library: served.version for library, served in served_models().items()} == {
        library: versions[-1] for library, versions in tested.items()
    }, "run: tools/served_models.py"


def test_refused_types_are_decoder_only_types() -> None:
    assert REFUSED.keys() <= set(decoder_types())
