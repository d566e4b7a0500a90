"""What every section of a configuration shares: frozen, and strict about keys and scalars.

Scalars are strict because YAML already typed them: `draws: true` is a mistake and not one draw.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt

__all__ = ["Count", "Fraction", "Natural", "Seconds", "Section", "Seed"]

Natural = Annotated[StrictInt, Field(ge=0)]
Seed = Annotated[StrictInt, Field(ge=0, lt=2**63)]
Count = Annotated[StrictInt, Field(ge=1)]
Seconds = Annotated[StrictFloat, Field(gt=0)]
Fraction = Annotated[StrictFloat, Field(ge=0)]


class Section(BaseModel):
    """A mapping of the YAML file: unknown keys are refused, and nothing changes after loading."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False, protected_namespaces=()
    )
