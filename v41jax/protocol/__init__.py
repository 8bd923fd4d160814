"""Chat protocol: messages to prompts, generated text to replies. No jax, no model code."""
