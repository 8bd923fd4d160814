"""Load for a running server, any that speaks OpenAI's API: what is sent, how it is timed, and what is reported.

`workloads` makes requests, `client` sends them and takes times, `report` turns times into percentiles. `v41jax bench
serve` puts them together. Nothing here knows the engine.
"""
