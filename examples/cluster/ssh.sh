#!/bin/bash
# Run on hosts that ssh reaches without a password: start Ray on all, run `camshaft ppo` on the first, stop Ray.
#
#     HOSTS="gpu1 gpu2" examples/cluster/ssh.sh trainer.n_gpus_per_node=8 data.train_files=/shared/train.parquet ...
#
# Takes the arguments of `camshaft ppo`. This folder, the environment, models, data and trainer.default_local_dir must
# have the same paths on every host. The final `ray stop` stops all of your Ray processes on these hosts.
set -euo pipefail

read -ra hosts <<< "${HOSTS:?set HOSTS=\"host1 host2\"}"
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

address=$(on "${hosts[0]}" hostname -I) # all addresses; the other hosts use the first one
address=${address%% *}

trap stop EXIT
on "${hosts[0]}" "$bin/ray" start --head --node-ip-address="$address" --port="$port" --include-dashboard=false
for host in "${hosts[@]:1}"; do
    on "$host" "$bin/ray" start --address="$address:$port"
done

on "${hosts[0]}" env RAY_ADDRESS="$address:$port" "$bin/camshaft" ppo \
    trainer.controller=ray trainer.nnodes="${#hosts[@]}" "$@"
