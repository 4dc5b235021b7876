#!/bin/sh
# GRPO on a CPU with one process that trains and one that generates. Further arguments are
# config keys: sh examples/async/cpu.sh steps=10
set -e
here=$(cd "$(dirname "$0")" && pwd)
python -c "
from camshaft.data import write_arithmetic
from camshaft.models.tiny import make_tiny_model
make_tiny_model('models/async', hidden=64, initializer_range=0.1)
write_arithmetic('data/async', left=(0, 20), right=(0, 20), num_train=320, num_heldout=40)
"
camshaft ppo model=models/async data=data/async/train.parquet val_data=null \
  reward="$here/even_digits.py" algorithm=grpo n=8 batch=8 steps=40 lr=3e-3 response_length=8 \
  max_staleness=1 algorithm.rollout_correction.bypass_mode=true out=runs/async "$@"
