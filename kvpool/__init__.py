"""kvpool: a distributed KV-cache pool for LLM inference.

Redo-prefill is always correct; a load only ever shortens it. See ``docs/architecture.md`` for the map.
"""

__version__ = "0.1.0"
