"""One module a subcommand of `v41jax`; each parses its flags and calls the library."""
