"""`python -m v41jax` is the `v41jax` command."""

from v41jax.cli import main

main()
