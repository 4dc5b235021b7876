"""What `camshaft ppo --help`, `camshaft sft --help` and their kin print."""

from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import Section
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.rm import RMConfig
from camshaft.config.schema.sft import SFTConfig

_OPTIONS = """\
  -m key=1,2,3                           one run per value, one after another
  --cfg job                              print the config, check it, start nothing
  --config-dir DIR --config-name NAME    DIR/NAME.yaml is laid over the defaults
  --hydra-help                           what else Hydra can do
"""

USAGE: dict[type[Section], str] = {
    PPOConfig: f"""\
usage: camshaft ppo key=value ...        train with PPO and its kin

Every run needs:
  data.train_files=FILE data.val_files=FILE                   parquet
  actor_rollout_ref.model.path=FOLDER critic.model.path=FOLDER    the critic's for algorithm.adv_estimator=gae only
  actor_rollout_ref.rollout.name=torch
  trainer.n_gpus_per_node=1 trainer.device=cuda               or cpu; one process per device
  actor_rollout_ref.actor.strategy=fsdp                       or reference: plain torch, one process
All keys: camshaft config show. One of them: camshaft config explain KEY

{_OPTIONS}
example (with the lines above):
  camshaft ppo ... algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.optim.lr=1e-6
""",
    SFTConfig: f"""\
usage: camshaft sft key=value ...        supervised fine-tuning

Every run needs:
  data.train_files=FILE data.val_files=FILE                   parquet; null for no validation
  model.path=FOLDER
  trainer.n_gpus_per_node=1 trainer.device=cuda               or cpu; one process per device
  strategy=fsdp                                               or reference: plain torch, one process
All keys: camshaft config show --trainer sft. One of them: camshaft config explain --trainer sft KEY

{_OPTIONS}
example:
  camshaft sft data.train_files=train.parquet data.val_files=null model.path=models/mine
""",
    RMConfig: f"""\
usage: camshaft rm key=value ...         train a reward model on pairs of answers

Every run needs:
  data.train_files=FILE data.val_files=FILE                   parquet; null for no validation
  model.path=FOLDER                                           a language model, or a reward model
  trainer.n_gpus_per_node=1 trainer.device=cuda               or cpu; one process per device
  strategy=fsdp                                               or reference: plain torch, one process
All keys: camshaft config show --trainer rm. One of them: camshaft config explain --trainer rm KEY

{_OPTIONS}
example:
  camshaft rm data.train_files=pairs.parquet data.val_files=null model.path=models/mine
""",
    GenerateConfig: f"""\
usage: camshaft generate key=value ...   responses to the prompts of a parquet file

Every run needs:
  data.path=FILE data.output_path=FILE                        parquet; the output must not be there yet
  model.path=FOLDER
  trainer.n_gpus_per_node=1 trainer.device=cuda               or cpu; one process per device
A run that was stopped goes on when the same command is typed again.
All keys: camshaft config show --trainer generate. One of them: camshaft config explain --trainer generate KEY

{_OPTIONS}
example (the second line scores them too, by data_source):
  camshaft generate data.path=test.parquet data.output_path=out.parquet model.path=models/mine rollout.n=8 \\
    custom_reward_function.name=auto
""",
    EvalConfig: f"""\
usage: camshaft eval key=value ...       score responses: mean@n, best@k, maj@k and pass@k of each data set

Every run needs:
  data.path=FILE                                              parquet, as camshaft generate writes it
  custom_reward_function.path=FILE                            or .name=gsm8k, ...; otherwise by data_source
Written if asked for:
  data.metrics_path=FILE.json data.output_path=FILE.parquet   the numbers; the rows with their scores
All keys: camshaft config show --trainer eval. One of them: camshaft config explain --trainer eval KEY

{_OPTIONS}
example:
  camshaft eval data.path=responses.parquet custom_reward_function.path=my_reward.py
""",
}
"""By the schema of the command's config."""
