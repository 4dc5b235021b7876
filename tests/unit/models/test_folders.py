"""Model folders that cannot be used end in one sentence with the folder, the file and the reason."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import Forked, Run, finished, sft_args, start
from support.model_folders import DAMAGES, INDEX, WEIGHTS, copy_model, damaged_folder
from support.ppo_runs import ppo_args

from camshaft.config import EngineModel
from camshaft.errors import EngineError
from camshaft.models.folders import convert_errors
from camshaft.models.loader import load_config, load_model, load_tokenizer, stored_weights
from camshaft.rollout.shared_model import load_stop_ids


def read_everything(folder: Path) -> None:
    """Read a folder as a run does: tokenizer, model with its weights, and end-of-sequence tokens."""
    load_tokenizer(str(folder))
    load_model(EngineModel(path=str(folder)), "float32", "cpu", seed=0)
    load_stop_ids(folder, load_config(folder, False, {}), False)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_model_folder_is_one_sentence(kind: str, tmp_path: Path) -> None:
    folder = damaged_folder(kind, tmp_path)
    with pytest.raises(EngineError) as caught:
        read_everything(folder)
    message, damage = str(caught.value), DAMAGES[kind]
    assert [word for word in (str(folder), damage.file, *damage.words.split()) if word not in message] == []
    assert len(message.splitlines()) <= 2


def test_an_index_without_metadata_is_complete(tmp_path: Path) -> None:
    folder = copy_model(tmp_path)
    expected = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(expected, "model-00001-of-00001.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    before = sorted(folder.iterdir())
    weights = dict(stored_weights(EngineModel(path=str(folder))))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    read_everything(folder)
    assert sorted(folder.iterdir()) == before
    assert json.loads((folder / INDEX).read_text()) == index


def test_fewer_layers_without_layer_types_make_a_smaller_model(tmp_path: Path) -> None:
    folder = copy_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    model = load_model(EngineModel(path=str(folder), random_init=True), "float32", "cpu", seed=0)
    assert len(model.hf.model.layers) == 1


def test_random_weights_ignore_a_quantization_that_is_overridden(tmp_path: Path) -> None:
    model = EngineModel(
        path=str(damaged_folder("gptq", tmp_path)), random_init=True, override_config={"quantization_config": None}
    )
    assert load_model(model, "float32", "cpu", seed=0).hf.num_parameters() > 0


def test_an_override_with_too_many_layers_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="num_hidden_layers=1000000000, but at most 10000 layers"):
        load_config(copy_model(tmp_path), False, {"num_hidden_layers": 10**9})


def test_a_lack_of_memory_is_not_an_error_of_the_folder() -> None:
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        with pytest.raises(type(error)) as caught, convert_errors(lambda _: "the folder is damaged"):
            raise error
        assert caught.value is error


# -- commands -----------------------------------------------------------------------------------------


def check_sentence(run: Run, status: int, *words: object) -> None:
    assert (run.status, "Traceback" in run.err) == (status, False), run.err
    assert [word for word in map(str, words) if word not in run.err] == []


def test_the_command_refuses_quantized_weights_before_it_starts(tmp_path: Path) -> None:
    folder = damaged_folder("awq", tmp_path)
    for command, arguments in {
        "ppo": ppo_args(tmp_path, {"actor_rollout_ref.model.path": folder}),
        "sft": sft_args(tmp_path, {"model.path": folder}),
    }.items():
        run = finished(start("-m", "camshaft", command, *arguments))
        check_sentence(run, 2, folder, "config.json: awq", "QLoRA", "unquantized model")


@pytest.mark.parametrize("kind", ["num_hidden_layers=1", "generation config is damaged"])
def test_the_command_names_the_damaged_file(kind: str, tmp_path: Path) -> None:
    folder = damaged_folder(kind, tmp_path)
    arguments = ppo_args(tmp_path, {"actor_rollout_ref.model.path": folder, "trainer.total_training_steps": 1})
    run = finished(Forked("ppo", *arguments))
    check_sentence(run, 1, folder / DAMAGES[kind].file, *DAMAGES[kind].words.split())
