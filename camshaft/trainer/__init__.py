"""The trainers: the step of reinforcement learning, supervised fine-tuning and reward models, on the same engines.

ppo.py         PPOTrainer: the step, and the loop around it. Read this first
parts.py       what a run is made of, built from the config
deal.py        which rank learns which rows, epoch by epoch
advantages.py  scores -> rewards -> advantages, on the driver
baseline.py    the greedy response that ReMax compares with
dynamic.py     prompts until enough of them have something to learn from (DAPO)
validate.py    scores on held-out prompts, and what was said
metrics.py     the numbers of a step
supervised.py  the run of one model; sft.py, rm.py   what is learnt in it
main_ppo.py, main_sft.py, main_rm.py   the entry points: python -m camshaft.trainer.main_ppo key=value ...
"""
