"""The engine: loading, training, caching, saving, sampling. Imports torch."""
