"""The C header of the kinds of kernels: `python -m tests.support.kinds_header` writes it anew from the table."""

from __future__ import annotations

from typing import Final

from pipeline.ops.kinds import Kind
from tests.support.paths import ROOT

HEADER: Final = ROOT / "examples" / "plan_reader" / "onnxline_kinds.h"

TEMPLATE: Final = """\
/* The kinds of kernels that a plan.bin names by number, as the table of operators has them; a number never changes. */
#ifndef ONNXLINE_KINDS_H
#define ONNXLINE_KINDS_H

#include <stdint.h>

#define ONNXLINE_KINDS(KIND) \\
ROWS

#define ONNXLINE_ENTRY(name, number) ONNXLINE_KIND_##name = number,
enum onnxline_kind { ONNXLINE_KINDS(ONNXLINE_ENTRY) };
#undef ONNXLINE_ENTRY

static inline const char *onnxline_kind_name(uint32_t kind_id) {
#define ONNXLINE_NAME(name, number) case number: return #name;
    switch (kind_id) {
        ONNXLINE_KINDS(ONNXLINE_NAME)
        default: return "?";
    }
#undef ONNXLINE_NAME
}

#endif
"""


def kinds_header() -> str:
    """The text of the header, a row for each kind in the order of the numbers."""
    return TEMPLATE.replace("ROWS", " \\\n".join(f"    KIND({kind.name}, {int(kind)})" for kind in sorted(Kind)))


if __name__ == "__main__":
    HEADER.write_text(kinds_header(), encoding="utf-8")
