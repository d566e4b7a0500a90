"""Which parameters of the slowest tests `make test` runs: one of each shape. `make test-all` runs the whole list.

`python -m benchmarks.mutations` says whether faults of the product are found by what is left as by the whole list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

ONE_OF_EACH: Final[Mapping[str, Sequence[str]]] = {
    # Over oneself and across; positions that are projected too; 1×1 Conv; Einsum; K and V from one latent matrix.
    "benchmarks/model_families/test_detect.py::test_finds_the_triples_that_torch_ran": (
        "bert_decoder", "deberta_v2", "squeezebert", "xlnet", "deepseek_v3",
    ),
    "fuzz/test_fuzz.py::test_broken_files_end_in_a_result_or_in_one_message": ("0",),
    # Each model in one dtype, and each dtype.
    "pipeline/training/test_equal_to_torch.py::test_losses_are_those_of_torch_in_every_dtype": (
        "mlp-torch.float32", "mlp-torch.float64", "mlp-torch.bfloat16", "cnn with BatchNorm-torch.float64",
        "ViT-tiny-torch.float32", "GPT-2-tiny-torch.bfloat16",
    ),
    "pipeline/training/test_equal_to_torch.py::test_losses_and_parameters_are_those_of_torch": (
        "mlp-SGD", "mlp-SGD with momentum", "mlp-Adam", "mlp-Adam with AMSGrad", "mlp-Adam that maximizes", "mlp-AdamW",
        "cnn with BatchNorm-AdamW", "transformer with dropout-AdamW",
    ),
}  # fmt: skip
"""Test → its parameters, as pytest writes them."""
