"""The package's own record of where a measurement comes from, under the name the benchmarks use."""

from v41jax.provenance import commit_hash, provenance

__all__ = ["commit_hash", "provenance"]
