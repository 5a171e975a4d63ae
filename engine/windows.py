"""Which tokens a step reads."""

from engine.shards import Windows  # noqa: F401, its place is here
