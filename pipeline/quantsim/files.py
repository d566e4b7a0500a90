"""The files of a simulation, and its weights in the layouts of 4 bits that `quantsim.layouts` names.

A layout is proven twice: its integers, zero points and scales are read back from the file and have the bits of the
quantized model, and a model in another layout is a step whose outputs are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from passes.optimize import optimize
from passes.rewrites.matmul_nbits import NibbleWeight
from passes.rewrites.nibble_files import find_nibbles, pack_nibbles, read_nibbles, write_nibbles
from passes.run.result import PassRow
from passes.suggest import plural
from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import save
from pipeline.config import QuantSimConfig
from pipeline.config.quantsim import EVERYTHING, FLOAT
from pipeline.errors import CheckFailed, UsageError
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.optimizers import FOUR_BITS
from pipeline.quantsim.placement import PlacementRule, place
from pipeline.quantsim.profiles import formats_of, rules_of
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.report import QuantSimReport, report_text
from pipeline.stages.report import (
    CHECKPOINT_CONFIG,
    ENCODINGS,
    LAYOUT_FILES,
    LAYOUTS,
    QUANTIZATION_REPORT,
    QUANTIZED_MODEL,
    ROUNDED_MODEL,
)
from pipeline.workspace import Workspace

MATMUL_NBITS: Final = "matmul-nbits"
"""The layout that is a model, and no checkpoint."""


def write_simulation(
    workspace: Workspace, report: QuantSimReport, quantized: DetachedModel, encodings: str, tuned: DetachedModel | None
) -> tuple[str, ...]:
    """Write the quantized model, its encodings and the report.

    Args:
        workspace: of the run.
        report: what the simulation found.
        quantized: the model with QuantizeLinear and DequantizeLinear.
        encodings: the text of the file of encodings.
        tuned: the float model with the weights that `quantsim.optimize` has chosen, which the encodings round to the
            same values as in `quantized`; None where no step chose any.

    Returns:
        The names of the files in the folder of the run.
    """
    save(quantized, workspace.folder / QUANTIZED_MODEL)
    workspace.write_text(ENCODINGS, encodings)
    workspace.write_text(QUANTIZATION_REPORT, report_text(report))
    if tuned is not None:
        save(tuned, workspace.folder / ROUNDED_MODEL)
        return (QUANTIZED_MODEL, ROUNDED_MODEL, ENCODINGS, QUANTIZATION_REPORT)
    for stale in workspace.folder.glob(f"{ROUNDED_MODEL}*"):
        stale.unlink()
    return (QUANTIZED_MODEL, ENCODINGS, QUANTIZATION_REPORT)


def check_layouts(settings: QuantSimConfig) -> None:
    """Refuse layouts that the formats of a configuration cannot have, before anything runs.

    Raises:
        UsageError: no weight has 4 bits.
    """
    if settings.layouts and all(precision.bits != FOUR_BITS for precision in formats_of(settings)):
        raise UsageError(
            f"quantsim.layouts: {settings.layouts[0]} holds weights of 4 bits, and no rule gives a weight 4 bits; "
            "expected a rule such as 'op:MatMul': {weights: int4/block32}"
        )


def check_weights(model: DetachedModel, settings: QuantSimConfig) -> None:
    """Refuse weights that a checkpoint cannot hold, before ranges are measured; the scales of weights need none.

    Raises:
        UsageError: it names the weight, or there is none of 4 bits.
    """
    checkpoints = [layout for layout in settings.layouts if layout != MATMUL_NBITS]
    if not checkpoints:
        return
    placement = place(model, (*rules_of(settings, model), PlacementRule(EVERYTHING, activations=FLOAT)))
    quantized = insert_qdq(model, encode(placement, {}, model))
    for layout in checkpoints:
        pack_nibbles(quantized, layout)  # type: ignore[arg-type]


def write_layouts(
    quantized: DetachedModel, layouts: Sequence[str], folder: Path, feeds: Mapping[str, np.ndarray]
) -> dict[str, str]:
    """Write the weights of the quantized model in other layouts, each proven; those of earlier simulations go.

    Args:
        layouts: keys of `LAYOUTS`.
        folder: of the run.
        feeds: the inputs on which a model in another layout is compared.

    Returns:
        The path of each file below `folder` → a sentence on it; of a file with settings it is empty.

    Raises:
        UsageError: a layout cannot hold a weight, or there is no weight of 4 bits.
        CheckFailed: what is read back differs.
    """
    for stale in LAYOUT_FILES:
        (folder / stale).unlink(missing_ok=True)
    found: dict[str, str] = {}
    wanted = find_nibbles(quantized) if layouts else {}
    for layout in layouts:
        file = folder / LAYOUTS[layout]
        file.parent.mkdir(exist_ok=True)
        if layout == MATMUL_NBITS:
            # by the order of products, as the copy of a table that is the embedding too has another name
            read = dict(zip(wanted, _write_nbits_model(quantized, file, feeds), strict=False))
        else:
            write_nibbles(quantized, file, layout)  # type: ignore[arg-type]
            read = read_nibbles(file)
            found[f"{layout}/{CHECKPOINT_CONFIG}"] = ""
        _compare_bits(layout, read, wanted)
        count = plural(len(read), "weight")
        found[LAYOUTS[layout]] = f"{LAYOUTS[layout]} has {count} of 4 bits, equal bit for bit when read back"
    return found


def _write_nbits_model(quantized: DetachedModel, file: Path, feeds: Mapping[str, np.ndarray]) -> list[NibbleWeight]:
    """Write the model with MatMulNBits; returns its weights as the step back gives them."""
    run = optimize(quantized, ["to-matmul-nbits"], feeds=[feeds])
    _check_row(run.rows[0])
    save(run.model, file)
    back = optimize(read_model(file), ["from-matmul-nbits"], feeds=[feeds])
    _check_row(back.rows[0])
    return list(find_nibbles(back.model).values())


def _check_row(row: PassRow) -> None:
    if row.status.counts_as_reverted or not row.changed:
        raise CheckFailed(f"quantsim.layouts: {row.name} {row.status.replace('_', ' ')}: {row.reason}")


def _compare_bits(layout: str, found: Mapping[str, NibbleWeight], wanted: Mapping[str, NibbleWeight]) -> None:
    """Compare weights by name, since a file has its own order, and by element: a layout may have smaller blocks."""
    is_equal = found.keys() == wanted.keys() and all(
        np.array_equal(array, other)
        for name in wanted
        for array, other in zip(_spread(found[name]), _spread(wanted[name]), strict=True)
    )
    if not is_equal:
        raise CheckFailed(f"quantsim.layouts: {layout} is read back with other bits than it was written with")


def _spread(weight: NibbleWeight) -> tuple[np.ndarray[Any, Any], ...]:
    """The integer, the zero point and the scale of each element."""
    rows = len(weight.integers)
    blocked = (np.repeat(part, weight.block, axis=0)[:rows] for part in (weight.zero_points, weight.scales))
    return (weight.integers, *(part.astype(np.float32) for part in blocked))
