#!/bin/bash
# Submit a run to an existing Ray cluster, from any machine that reaches its dashboard.
#
#     RAY_API_SERVER_ADDRESS=http://head:8265 examples/cluster/submit.sh trainer.nnodes=2 trainer.n_gpus_per_node=8 ...
#
# Takes the arguments of `camshaft ppo`, with absolute paths, since the job runs in another folder on the head node. The
# job outlives this shell: see `ray job logs ID`, `ray job status ID` and `ray job stop ID`. The script exits with the
# job's status. RUNTIME_ENV is a JSON runtime environment, for example '{"env_vars": {"HF_HOME": "/shared/hf"}}'.
set -euo pipefail

: "${RAY_API_SERVER_ADDRESS:?set RAY_API_SERVER_ADDRESS=http://<head>:8265}"
options=(--address "$RAY_API_SERVER_ADDRESS" --submission-id "${ID:-camshaft-$(date +%Y%m%d-%H%M%S)}")
if [ -n "${RUNTIME_ENV:-}" ]; then
    options+=(--runtime-env-json "$RUNTIME_ENV")
fi

exec ray job submit "${options[@]}" -- camshaft ppo trainer.controller=ray "$@"
