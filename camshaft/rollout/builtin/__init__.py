"""The built-in generator: continuous batching on the training weights."""
