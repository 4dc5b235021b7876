"""Weight sync: validate the weights that a rollout receives and move weights between processes.

checks.py     validate the names, shapes and tied weights of a weight sync
buckets.py    pack tensors into buckets of bounded size and restore them
transport.py  move a bucket to another process through shared memory, device memory or a broadcast
"""
