"""`onnxline schema`: the JSON Schema of a configuration."""

from __future__ import annotations

import json

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("schema")(schema)


def schema() -> None:
    """Write the JSON Schema of a configuration, for editors."""
    from pipeline.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
