"""The trainers: PPO, supervised fine-tuning and reward models, on the same engines and roles.

ppo.py               PPOTrainer: the step, and the loop around it; read this first
build.py             PPOParts: data, rewards, worker pools, roles and checkpoints of a PPO run
advantages.py        rewards, advantages and rollout correction, computed on the driver
scoring.py           reward functions and the reward model of a run
dynamic_sampling.py  sample prompts until enough of them have a learning signal (DAPO)
mini_batches.py      sharding of mini-batches over the ranks
validate.py          scores and responses on held-out prompts
metrics.py           metrics of a step
supervised.py        base class of sft.py and rm.py
sft.py, rm.py        supervised fine-tuning; reward models
generate.py          `camshaft generate`: responses to the prompts of a file
evaluate.py          `camshaft eval`: scores of responses in a file
check_data.py        `camshaft check-data`
session.py           setup shared by all trainers: logging, output folder, worker pools, trackers
resume.py            checks and log lines of a run that resumes
main_ppo.py, main_sft.py   `python -m camshaft.trainer.main_ppo`, the same as `camshaft ppo`
"""
