"""`camshaft plan` forecasts runs on GPUs without a GPU. Oracles are arithmetic on the config."""

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import camshaft

from benchmarks.plan import write_inputs
from benchmarks.plan_large import MODELS, run_arguments, write_model
from camshaft.config import PPOConfig, compose
from camshaft.config.engine import EngineModel
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.dataproto import Ragged
from camshaft.device import simulate_cuda
from camshaft.models.activations import offload_activations
from camshaft.models.linear_logprob import linear_logprob
from camshaft.models.loader import load_model
from camshaft.planning.devices import parse_device
from camshaft.planning.generator import forecast_alone, forecast_generator, model_size
from camshaft.planning.layers import Phase
from camshaft.planning.plan import make_plan
from camshaft.planning.tensor_memory import TensorMemory
from camshaft.planning.trace import CRITIC, POLICY, forecast
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

GIB, MIB = 2**30, 2**20
RANKS = 8
SHORT = ("data.max_prompt_length=64", "data.max_response_length=64", "data.train_batch_size=8")


def parameters(name: str, head: int | None = None) -> int:
    """Count the parameters of a model by hand. `head` is the number of outputs, by default the vocabulary."""
    c = MODELS[name]
    hidden, wide, dim = c["hidden_size"], c["intermediate_size"], c["hidden_size"] // c["num_attention_heads"]
    keys = c["num_key_value_heads"] * dim
    bias = hidden + 2 * keys if c["model_type"] == "qwen2" else 0
    layer = 2 * hidden * hidden + 2 * hidden * keys + bias + 3 * hidden * wide + 2 * hidden
    outputs = c["vocab_size"] if head is None else head
    return c["num_hidden_layers"] * layer + (c["vocab_size"] + outputs) * hidden + hidden


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("devices")
    write_model(folder, "7B")
    return folder


def config_of(folder: Path, *changes: str) -> PPOConfig:
    arguments = ["trainer.device=cuda", *run_arguments(folder, "7B", RANKS), *SHORT, *changes]
    return compose(arguments, PPOConfig)[0]


def keep_on_device(*roles: str) -> list[str]:
    return [f"{role}.{key}_offload=false" for role in roles for key in ("param", "optimizer")]


ON_DEVICE = (
    *keep_on_device("actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config"),
    "actor_rollout_ref.ref.fsdp_config.param_offload=false",
)


def phases(process: ProcessPoolExecutor, config: PPOConfig, group: str) -> dict[str, Phase]:
    found = process.submit(forecast, config, group).result(timeout=300)
    return {phase.name: phase for phase in found if phase.role != "ref" or phase.name == "ref"}


@pytest.mark.slow
def test_sharded_state_is_that_of_arithmetic(folder: Path, process: ProcessPoolExecutor) -> None:
    actor = phases(process, config_of(folder, *ON_DEVICE), POLICY)
    state, frozen = 12 * parameters("7B") / RANKS, 4 * parameters("7B") / RANKS
    assert actor["update_actor"].rest == pytest.approx(state + frozen, rel=0.01)  # weights, two moments; reference
    assert actor["save"].disk == pytest.approx(12 * parameters("7B"), rel=0.01)
    # With short rows, the peak consists of gradients and of the gathered embedding and output.
    root = 2 * MODELS["7B"]["vocab_size"] * MODELS["7B"]["hidden_size"]
    least = state + frozen + 4 * parameters("7B") / RANKS
    assert least < actor["update_actor"].peak < least + root * (2 + 2 + 4 + 4) + GIB


def test_offloaded_state_is_in_host_memory(folder: Path, process: ProcessPoolExecutor) -> None:
    critic = phases(process, config_of(folder), CRITIC)
    state = 12 * parameters("7B", head=1) / RANKS
    assert critic["update_critic"].rest < 0.01 * state
    assert critic["values"].host == pytest.approx(state, rel=0.01)  # in the second step, with the optimizer's state
    assert critic["update_critic"].peak > state


@pytest.mark.slow
def test_the_offload_policy_keeps_state_in_host_memory(folder: Path, process: ProcessPoolExecutor) -> None:
    policy = "critic.model.fsdp_config.offload_policy=true"
    changes = (*keep_on_device("critic.model.fsdp_config"), policy)
    offloaded = phases(process, config_of(folder, *changes), CRITIC)
    plain = phases(process, config_of(folder, *keep_on_device("critic.model.fsdp_config")), CRITIC)
    state = 16 * parameters("7B", head=1) / RANKS  # with the gradients
    assert offloaded["update_critic"].host == pytest.approx(state, rel=0.01)
    difference = plain["update_critic"].peak - offloaded["update_critic"].peak
    assert difference == pytest.approx(state, rel=0.1)


# -- the generator --------------------------------------------------------------------------------


def test_vllm_reserves_its_share_of_the_device(folder: Path) -> None:
    memory = parse_device("h100")
    generator = forecast_generator(config_of(folder), memory, resident=0, rows=64)
    assert generator is not None
    assert (generator.gen, generator.rest) == (int(0.6 * memory), 0)
    awake = config_of(folder, "actor_rollout_ref.rollout.free_cache_engine=false")
    generator = forecast_generator(awake, memory, resident=0, rows=64)
    assert generator is not None
    assert generator.rest == int(0.6 * memory)


def test_a_share_that_is_too_small_grows_to_one_row(folder: Path) -> None:
    config = config_of(folder, "actor_rollout_ref.rollout.gpu_memory_utilization=0.01")
    generator = forecast_generator(config, parse_device("h100"), resident=0, rows=64)
    row = 128 * 28 * 2 * 4 * 128 * 2  # tokens, layers, keys and values, heads, their size, bytes
    assert generator is not None
    assert generator.gen == 2 * parameters("7B") + row


def test_rows_that_are_kept_between_answers_have_a_third_of_the_cache(folder: Path) -> None:
    slot, sampling = 4096 * 28 * 2 * 4 * 128 * 2, 40 * MODELS["7B"]["vocab_size"]
    budget = (10 * slot + 9 * sampling) * 3 // 2 + MIB
    memory, free = 100 * GIB, budget * 10 // 9 + 2
    config = config_of(
        folder,
        "actor_rollout_ref.rollout.name=torch",
        "actor_rollout_ref.rollout.multi_turn.environment=my_package:Game",
        "data.max_response_length=4032",
        "actor_rollout_ref.rollout.gpu_memory_utilization=1.0",
    )
    generator = forecast_generator(config, memory, resident=memory - free, rows=64)
    assert generator is not None
    assert generator.rows == 9
    assert generator.gen == pytest.approx(10 * slot + 9 * sampling + budget / 3, abs=MIB)


OWN = ("actor_rollout_ref.hybrid_engine=false", "+trainer.resource_pools.rollout.n_gpus_per_node=2")


def test_a_rollout_on_devices_of_its_own_has_rows(folder: Path) -> None:
    memory = parse_device("h100")
    plan = make_plan(config_of(folder, *OWN), memory)
    peaks = {(row.pool, row.phase): row.peak for row in plan.rows}
    assert peaks["rollout", "gen"] == int(0.6 * memory)
    assert 0 < peaks["global_pool", "sync"] < peaks["global_pool", "update_actor"]
    assert ("global_pool", "gen") not in peaks


@pytest.mark.parametrize("name", ["vllm", "process"])
def test_the_share_that_a_library_reserves_on_a_cpu_is_unknown(folder: Path, name: str) -> None:
    rollout = ["actor_rollout_ref.rollout.name=process", "+actor_rollout_ref.rollout.engine_kwargs.rollout=vllm"]
    words = rollout if name == "process" else ["actor_rollout_ref.rollout.name=vllm"]
    config = config_of(folder, *OWN, "trainer.device=cpu", "actor_rollout_ref.rollout.dtype=float32", *words)
    assert forecast_alone(config, 100 * GIB, ranks=2) is None
    builtin = config.actor_rollout_ref.rollout.model_copy(update={"name": "torch", "engine_kwargs": {}})
    config = config.model_copy(
        update={"actor_rollout_ref": config.actor_rollout_ref.model_copy(update={"rollout": builtin})}
    )
    assert forecast_alone(config, 100 * GIB, ranks=2) is not None


def test_the_builtin_cache_holds_the_rows_that_fit(folder: Path) -> None:
    slot, sampling = 4096 * 28 * 2 * 4 * 128 * 2, 40 * MODELS["7B"]["vocab_size"]
    size = 10 * slot + 9 * sampling  # one slot more than rows
    memory, free = 100 * GIB, (size + MIB) * 10 // 9  # a tenth of the free memory is left to activations
    config = config_of(
        folder,
        "actor_rollout_ref.rollout.name=torch",
        "data.max_response_length=4032",
        "actor_rollout_ref.rollout.gpu_memory_utilization=1.0",
    )
    generator = forecast_generator(config, memory, resident=memory - free, rows=64)
    assert generator is not None
    assert (generator.rows, generator.gen) == (9, size)


def test_sizes_of_keys_and_values_are_those_of_the_cache(tmp_path: Path) -> None:
    write_inputs(tmp_path, hidden=64, layers=3)
    config = RolloutEngineConfig(model_path=str(tmp_path / "model"), max_model_len=64)
    rollout = TorchRollout(config)
    rollout.load_weights(load_model(EngineModel(path=config.model_path), "float32", "cpu", 0).weights())
    rollout.generate_sequences(Ragged.from_rows([torch.tensor([3, 4, 5])]), SamplingParams(max_tokens=2))
    size = model_size(config)
    assert dict(enumerate(size.position)) == rollout.cache.position_bytes
    assert size.weights == rollout.model.num_bytes


# -- the code path of CUDA ------------------------------------------------------------------------


def test_log_probs_take_the_tiles_of_a_gpu() -> None:
    with simulate_cuda(), TensorMemory(computes=False) as memory:
        hidden = torch.empty(8192, 512, dtype=torch.bfloat16)
        weight = torch.empty(65536, 512, dtype=torch.bfloat16)
        before = memory.live
        linear_logprob(hidden, weight, torch.zeros(8192, dtype=torch.int64), outputs=("entropy",))
    tile = 4 * 2**26
    assert 2 * tile <= memory.peak - before < 2.1 * tile


def test_offloaded_activations_are_in_host_memory() -> None:
    with simulate_cuda(), TensorMemory(computes=False) as memory:
        x = torch.empty(1024, 1024, requires_grad=True)
        with offload_activations("cpu"):
            y = (x * 2).exp().sum()  # the result of exp is saved
        assert (memory.live, memory.host_live) == (4 * MIB + 4, 4 * MIB)
        y.backward()
        assert memory.peak >= 12 * MIB  # x, its gradient, and the activation copied back
    assert not torch.empty(1, requires_grad=True).is_pinned()


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_folder_needs_only_its_config(tmp_path: Path) -> None:
    write_inputs(tmp_path, hidden=64, layers=2)
    for file in (tmp_path / "model").iterdir():
        if file.name != "config.json":
            file.unlink()
    arguments: list[Any] = [f"model={tmp_path / 'model'}", f"data={tmp_path / 'train.jsonl'}", "val_data=null"]
    arguments += ["algorithm=grpo", "trainer.n_gpus_per_node=2", "trainer.nnodes=1", *SHORT[:2]]
    plan = camshaft("plan", "--device", "h100", "--json", *arguments)
    content = json.loads(plan.out)
    assert (plan.status, content["memory"]) == (0, 79 * GIB)
    assert {"sync", "gen", "update_actor"} <= {row["phase"] for row in content["rows"]}
    assert any("the CUDA context, communication buffers" in note for note in content["notes"])
    assert camshaft("plan", "--memory", "1MiB", "trainer.device=cuda", *arguments).status == 3


def test_the_memory_of_an_absent_device_must_be_named(folder: Path) -> None:
    run = camshaft("plan", "trainer.device=cuda", *run_arguments(folder, "7B", RANKS))
    assert run.status == 2
    assert "set --device to one of a100-40" in run.err


def test_unknown_and_contradicting_devices_are_rejected(folder: Path) -> None:
    arguments = run_arguments(folder, "7B", RANKS)
    unknown = camshaft("plan", "--device", "h1000", *arguments)
    assert unknown.status == 2
    assert "--device h1000 is unknown" in unknown.err
    contradiction = camshaft("plan", "--device", "h100", *arguments, "trainer.device=cpu")
    assert contradiction.status == 2
    assert "remove one of them" in contradiction.err
