"""`pipeline.export.parts.pair` under the name that scripts import: prefill and decode over a cache of fixed length."""

from pipeline.export.parts.pair import *  # noqa: F403
