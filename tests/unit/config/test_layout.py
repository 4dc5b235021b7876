"""Resource pools, controllers, and invalid placements."""

import pytest

from camshaft.config import Topology, load_ppo, load_sft, rollout_engine
from camshaft.errors import ConfigError

FSDP = ("actor_rollout_ref.actor.strategy=fsdp", "critic.strategy=fsdp")


def test_all_roles_share_the_global_pool(words: list[str]) -> None:
    config = load_ppo([*words, *FSDP, "trainer.n_gpus_per_node=2"])
    assert config.pools() == {"actor_rollout_ref": "global_pool", "critic": "global_pool"}
    assert config.topology() == Topology(2, 2)
    assert config.trainer.backend() == "local"


def test_role_in_another_pool_has_the_ranks_of_that_pool(words: list[str]) -> None:
    pool = ["+trainer.resource_pools.c.n_gpus_per_node=1", "critic.resource_pool=c"]
    config = load_ppo([*words, *FSDP, "trainer.n_gpus_per_node=2", *pool])
    assert config.topology() == Topology(2, 1)
    assert (config.actor_dp_size(config.topology()), config.critic_dp_size(config.topology())) == (2, 1)


def test_several_machines_use_ray(words: list[str]) -> None:
    assert load_ppo([*words, *FSDP, "trainer.nnodes=2"]).trainer.backend() == "ray"
    assert load_ppo([*words, "trainer.controller=ray"]).trainer.backend() == "ray"
    with pytest.raises(ConfigError, match=r"(?s)trainer.controller = local.*this machine only.*trainer.controller=ray"):
        load_ppo([*words, *FSDP, "trainer.nnodes=2", "trainer.controller=local"])


def test_single_device_engine_may_have_a_pool_of_one_rank(words: list[str]) -> None:
    pool = ["+trainer.resource_pools.c.n_gpus_per_node=1", "critic.resource_pool=c", "critic.strategy=reference"]
    load_ppo([*words, FSDP[0], "trainer.n_gpus_per_node=2", *pool])
    with pytest.raises(ConfigError, match=r"strategy=reference supports only one process"):
        load_ppo([*words, FSDP[0], "trainer.n_gpus_per_node=2", "critic.strategy=reference"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["critic.resource_pool=c"], r"(?s)critic.resource_pool = c.*unknown resource pool; the pools are global_pool"),
        (["+trainer.resource_pools.c.n_gpus_per_node=1"], "no role uses this pool"),
        (["+trainer.resource_pools.c.nodes=1"], "unknown key"),
        (["+trainer.resource_pools.global_pool.n_gpus_per_node=1"], "Rename the pool"),
        (["trainer.cpus_per_rank=0"], "> 0"),
        (["trainer.worker_timeout=0"], "> 0"),
        (["trainer.worker_timeouts.generate=-1"], "> 0"),
        (["trainer.controller=slurm"], "one of auto, local, ray"),
    ],
)
def test_invalid_placement_is_rejected(words: list[str], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_ppo([*words, *overrides])


def test_supervised_runs_have_the_same_placement_keys(sft_words: list[str]) -> None:
    assert load_sft([*sft_words, "trainer.controller=ray"]).trainer.backend() == "ray"
    with pytest.raises(ConfigError, match="this machine only"):
        load_sft([*sft_words, "trainer.nnodes=2", "trainer.controller=local"])


OWN = "actor_rollout_ref.hybrid_engine=false"
POOL = "+trainer.resource_pools.rollout.n_gpus_per_node"


def test_a_rollout_on_devices_of_its_own_has_a_pool(words: list[str]) -> None:
    config = load_ppo([*words, *FSDP, "trainer.n_gpus_per_node=4", OWN])
    assert config.pools()["rollout"] == "rollout"
    assert config.topology() == Topology(4, 4, rollout=1)
    assert load_ppo([*words, *FSDP, "trainer.n_gpus_per_node=4"]).topology().rollout_topology() == Topology(4)
    config = load_ppo([*words, *FSDP, "trainer.n_gpus_per_node=4", OWN, f"{POOL}=2"])
    assert config.rollout_dp_size(config.topology()) == 2
    named = ["+trainer.resource_pools.fast.n_gpus_per_node=3", "actor_rollout_ref.rollout.resource_pool=fast"]
    assert load_ppo([*words, OWN, *named]).topology().rollout == 3
    assert not rollout_engine(config).free_cache_engine


def test_a_rollout_on_devices_of_its_own_may_receive_adapters(words: list[str]) -> None:
    adapter = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.lora_weights=adapter")
    config = load_ppo([*words, OWN, "actor_rollout_ref.rollout.name=vllm", *adapter])
    assert config.topology().rollout == 1
    assert (lora := rollout_engine(config).lora) is not None
    assert lora.rank == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.device=cuda"],
            r"(?s)rollout.resource_pool = rollout.*add the pool with trainer.resource_pools.rollout.n_gpus_per_node=1",
        ),
        (["actor_rollout_ref.rollout.resource_pool=fast"], "unknown resource pool; the pools are global_pool"),
        (
            ["critic.resource_pool=rollout", f"{POOL}=1"],
            r"(?s)rollout.resource_pool = rollout.*but critic.resource_pool selects the same pool. Set actor_rollout",
        ),
        (["actor_rollout_ref.rollout.resource_pool=global_pool"], "Set actor_rollout_ref.hybrid_engine=true, or"),
        (["+trainer.resource_pools.global_pool.n_gpus_per_node=1"], "Rename the pool"),
        (
            ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
            r"(?s)rollout.tensor_model_parallel_size = 2.*world_size=1 is not divisible by the 2 ranks that form one "
            "vLLM engine; trainer.resource_pools.rollout sets the number of ranks",
        ),
    ],
)
def test_invalid_pools_of_the_rollout_are_rejected(words: list[str], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_ppo([*words, OWN, *overrides])
