#!/bin/bash
# A run on machines that ssh reaches without a password: starts Ray on all, `camshaft ppo` on the first, stops Ray.
#
#     HOSTS="gpu1 gpu2" examples/cluster/ssh.sh trainer.n_gpus_per_node=8 data.train_files=/shared/train.parquet ...
#
# The words are those of `camshaft ppo`. This folder, the environment that `camshaft` is in, models, data and
# trainer.default_local_dir are at the same place on every machine. `ray stop` at the end stops every Ray process that
# is yours on these machines: they run nothing else on Ray.
set -euo pipefail

read -ra hosts <<< "${HOSTS:?type HOSTS=\"one two\", as ssh knows them}"
port=${PORT:-6379}
bin=$(dirname "$(command -v camshaft)")

on() { # <host> <command...>
    ssh -o BatchMode=yes "$1" "cd $(printf %q "$PWD") && RAY_USAGE_STATS_ENABLED=0 $(printf '%q ' "${@:2}")"
}

stop() {
    for host in "${hosts[@]}"; do
        on "$host" "$bin/ray" stop || true
    done
}

address=$(on "${hosts[0]}" hostname -I) # its addresses; the first is the one the others are to use
address=${address%% *}

trap stop EXIT
on "${hosts[0]}" "$bin/ray" start --head --node-ip-address="$address" --port="$port" --include-dashboard=false
for host in "${hosts[@]:1}"; do
    on "$host" "$bin/ray" start --address="$address:$port"
done

on "${hosts[0]}" env RAY_ADDRESS="$address:$port" "$bin/camshaft" ppo \
    trainer.controller=ray trainer.nnodes="${#hosts[@]}" "$@"
