"""The HTTP server: OpenAI's chat and completion endpoints over one engine, with metrics and a page to try it.

`create_app` makes the application, `ServerOptions` are its settings; `v41jax serve` runs it under uvicorn. What a
prompt looks like and how a reply is read is `v41jax.protocol`'s, how tokens are made is the engine's.
"""

from v41jax.server.app import create_app
from v41jax.server.limits import ServerOptions

__all__ = ["ServerOptions", "create_app"]
