"""Timings of the product and its parts; nothing here is imported by the product."""
