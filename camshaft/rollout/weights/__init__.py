"""Weight sync: what a rollout expects, and how weights move between processes.

checks.py     validate names, shapes and tied weights of a weight sync
buckets.py    pack tensors into buckets of bounded size, and restore them
transport.py  move a bucket to another process: shared memory, device memory or a broadcast
"""
