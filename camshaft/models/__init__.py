"""Transformers models on packed rows: loading, heads, attention, adapters, and the fused output layer.

    from camshaft.models.loader import load_model
    from camshaft.models.packing import Packing
    model = load_model(EngineModel(path="models/tiny"), dtype="float32", device="cpu", seed=0)
    out = model(tokens, Packing([5, 3]), at, outputs=("log_probs",))

    packed.py           `PackedModel`: a transformers model and its head, called on packed rows
    classes.py          classes of transformers for each head, also where transformers has none
    heads.py            the outputs of each head, and their dimensions
    packing.py          `Packing`: lengths of packed segments, and shared prefixes
    padded_rows.py      calls on right-padded rows, for layers that cannot run on packed rows
    attention.py        the attention implementation "packed" of transformers models
    linear_logprob.py   the fused output layer: log-probs, entropy and KL divergence in tiles
    loader.py           reads and writes Hugging Face folders
    lora.py             LoRA adapters
    activations.py      gradient checkpointing, and offloading of activations to host memory
    sequence.py         sequence parallelism
    routing.py          routers of mixtures of experts: records and replays their choices
    tiny.py             creates small models for tests and demos
    cpu.py              autograd functions for CPUs: packed attention, RMSNorm
    triton/             Triton kernels for the tiles of the fused output layer

Engines and rollouts import this package, and this package imports neither.
"""
