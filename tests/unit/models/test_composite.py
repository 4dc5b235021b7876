"""The language model of a folder with a vision tower is trained, and an export keeps the tower."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import LINEAR, predicted_tokens, tiny_rows
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from camshaft.checkpoint import Probe, export_hugging_face
from camshaft.config.engine import EngineConfig, EngineModel
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import EngineError
from camshaft.models.composite import OTHER_PARTS
from camshaft.models.loader import load_model
from camshaft.models.packing import Packing
from camshaft.models.tiny import VOCABULARY_ROWS, make_tiny_tokenizer
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY_ROWS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": None,
    "initializer_range": 0.1,
}
QWEN_VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32},
    **{"patch_size": 4, "spatial_merge_size": 2, "num_position_embeddings": 16},
}
QWEN = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SIGLIP = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **QWEN,
        "text_config": {**TEXT, **LINEAR},
        "vision_config": QWEN_VISION,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        **QWEN,
        "text_config": {**TEXT, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
        "vision_config": QWEN_VISION,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        **{"mm_tokens_per_image": 4, "image_token_index": 3, "boi_token_index": 4, "eoi_token_index": 5},
        "text_config": {**TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": SIGLIP,
    },
}
LENGTHS = [7, 2, 12]


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_tiny_tokenizer(path)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[request.param](**CONFIGS[request.param]))
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"size": 8}')
    return path


def whole_model(folder: Path, dtype: str) -> Any:
    options = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    loaded: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def log_probs(model: Any) -> Tensor:
    rows = []
    for row in tiny_rows(LENGTHS):
        log_p = model(input_ids=row[None]).logits[0, :-1].log_softmax(-1)
        rows.append(log_p.gather(1, row[1:, None])[:, 0])
    return torch.cat(rows)


def test_log_probs_and_gradients_equal_those_of_the_whole_model(folder: Path) -> None:
    model = load_model(EngineModel(path=str(folder)), "float64", "cpu", seed=0)
    oracle = whole_model(folder, "float64")
    actual = model(torch.cat(tiny_rows(LENGTHS)), Packing(LENGTHS), predicted_tokens(LENGTHS), ("log_probs",))
    expected = log_probs(oracle)
    torch.testing.assert_close(actual["log_probs"], expected, rtol=0, atol=1e-6)
    actual["log_probs"].mean().backward()
    expected.mean().backward()
    oracle_gradients = {
        name.replace("model.language_model.", "model."): parameter.grad for name, parameter in oracle.named_parameters()
    }
    for name, parameter in model.hf.named_parameters():
        torch.testing.assert_close(parameter.grad, oracle_gradients[name], rtol=1e-5, atol=1e-6)


def test_an_export_keeps_the_vision_tower_bitwise(folder: Path, tmp_path: Path) -> None:
    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path=str(folder))))
    engine.init_model()
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    target = tmp_path / "out"
    export_hugging_face(engine.named_weights(), engine.config.model, target, Probe(engine.infer_batch))
    before, after = load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == bool(OTHER_PARTS.match(name)), name
    assert (target / "preprocessor_config.json").read_text() == '{"size": 8}'
    config, source = AutoConfig.from_pretrained(target), AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.architectures) == (source.model_type, source.architectures)
    assert config.vision_config.to_dict() == source.vision_config.to_dict()
    # The export is the source of another run.
    model = load_model(EngineModel(path=str(target)), "float64", "cpu", seed=0)
    actual = model(torch.cat(tiny_rows(LENGTHS)), Packing(LENGTHS), predicted_tokens(LENGTHS), ("log_probs",))
    torch.testing.assert_close(actual["log_probs"], log_probs(whole_model(target, "float64")), rtol=0, atol=1e-6)


def test_a_critic_is_exported_without_the_vision_tower(folder: Path, tmp_path: Path) -> None:
    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path=str(folder), head="value")))
    engine.init_model()
    export_hugging_face(engine.named_weights(), engine.config.model, tmp_path / "out", Probe(engine.infer_batch))
    assert AutoConfig.from_pretrained(tmp_path / "out").model_type.endswith("_text")
    load_model(EngineModel(path=str(tmp_path / "out"), head="value"), "float32", "cpu", seed=0)


def test_the_generator_samples_what_the_whole_model_does(folder: Path) -> None:
    oracle = whole_model(folder, "float32")
    rollout = TorchRollout(RolloutEngineConfig(model_path=str(folder), max_model_len=64))
    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path=str(folder))))
    engine.init_model()
    rollout.load_weights(engine.named_weights())
    prompts = tiny_rows([5, 9])
    out = rollout.generate_sequences(Ragged.from_rows(prompts), SamplingParams(16, temperature=0, ignore_eos=True))
    for prompt, response in zip(prompts, out.responses.rows(), strict=True):
        tokens = prompt
        for token in response:
            assert oracle(input_ids=tokens[None]).logits[0, -1].argmax() == token
            tokens = torch.cat([tokens, token[None]])


def test_unknown_weights_of_the_language_model_are_rejected(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.scale": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match=r"model\.norm\.scale is unknown"):
        load_model(EngineModel(path=str(tmp_path)), "float32", "cpu", seed=0)
