"""Does an IR compute what its model computes? Shares no code with extraction or with the planned runtime.

original.py   the model's own answer, on copies            numbers.py   two tensors
trees.py      two results, as trees                        localize.py  the first node that differs,
                                                           in regions too, beside the model's own trace (traced.py)
report.py     what came of it                              verify.py    all of it
"""

from pipeline.torch_ir.verify.numbers import _compare_tensors
from pipeline.torch_ir.verify.report import VerificationReport
from pipeline.torch_ir.verify.verify import IRVerifier, verify_ir, verify_ir_with_state_dict

__all__ = ["IRVerifier", "VerificationReport", "_compare_tensors", "verify_ir", "verify_ir_with_state_dict"]
