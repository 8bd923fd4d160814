"""DeepSeek-V4.1 in JAX: the model, its paged serving runtime and its command line."""
