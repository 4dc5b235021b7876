"""Play tasks of verifiers: each row of the data names a taskset and the number of one of its tasks."""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import resolve_env_config


async def play(taskset, index):
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    env = vf.load_environment(resolve_env_config({"taskset": {"id": taskset}}))
    (task,) = env.taskset.include(idx=[index])
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext("policy", client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        sys.exit("\n".join(f"{error.type}: {error.message}" for error in errors))
    return sum(trace.reward for trace in episode.traces if trace.agent.trainable)


row = json.load(sys.stdin)
print(json.dumps({"reward": asyncio.run(play(row["taskset"], row["index"]))}))
