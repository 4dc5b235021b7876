"""What is true of a model whatever trains it: loading, heads, packed attention, log-probs without logits.

    from camshaft.models.loader import load_model, load_tokenizer
    model = load_model(EngineModel(path="models/tiny"), dtype="float32", device="cpu", seed=0)
    out = model(tokens, lengths=[5, 3], at=at, outputs=("log_probs",))

`attention.py` is the one attention implementation, `packed.py` the forward of unpadded rows,
`linear_logprob.py` the fused output head, `loader.py` reads and writes Hugging Face folders, `tiny.py`
makes small models for tests and demos. Engines and rollouts import from here; nothing here imports them.
"""
