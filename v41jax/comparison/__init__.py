"""Comparison of two ways of computing the model: what runs, what is measured, where they part, and the report of it."""
