#!/bin/bash
# A run as a job of a Ray cluster that is there already; from any machine that reaches its dashboard.
#
#     RAY_API_SERVER_ADDRESS=http://head:8265 examples/cluster/submit.sh trainer.nnodes=2 trainer.n_gpus_per_node=8 ...
#
# The words are those of `camshaft ppo`, and every path in them is absolute: the job runs on the head, in another
# folder. It goes on when this shell ends; `ray job logs ID`, `ray job status ID` and `ray job stop ID` find it. Its
# exit status is this script's. RUNTIME_ENV is JSON for all its processes, '{"env_vars": {"HF_HOME": "/shared/hf"}}'.
set -euo pipefail

: "${RAY_API_SERVER_ADDRESS:?type RAY_API_SERVER_ADDRESS=http://<head>:8265}"
options=(--address "$RAY_API_SERVER_ADDRESS" --submission-id "${ID:-camshaft-$(date +%Y%m%d-%H%M%S)}")
if [ -n "${RUNTIME_ENV:-}" ]; then
    options+=(--runtime-env-json "$RUNTIME_ENV")
fi

exec ray job submit "${options[@]}" -- camshaft ppo trainer.controller=ray "$@"
