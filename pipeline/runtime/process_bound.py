"""What has launches holds memory of its process, so it is refused where Python would copy or pickle it."""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex

from passes.suggest import with_article
from pipeline.errors import UsageError


class ProcessBound:
    """Something that can be neither copied nor pickled."""

    instead: ClassVar[str] = "pickle the graph and its weights, and compile them again where they are read"
    """What to do in place of it, for the message."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """What `copy.copy`, `copy.deepcopy`, `pickle`, `torch.save` and a spawned process ask first.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{with_article(type(self).__name__)} can be neither copied nor pickled, since its launches hold memory "
            f"of this process; {self.instead}"
        )
