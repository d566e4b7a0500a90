"""Verify that an IR computes what its model computes. Shares no code with extraction or the planned runtime.

original.py    the model's own answer, on copies        localize.py  the first node that differs, in regions too,
comparison.py  two results as trees, and two tensors                 compared with the model's own trace
verify.py      all of it, and what came of it
"""

from pipeline.torch_ir.verify.comparison import _compare_tensors
from pipeline.torch_ir.verify.verify import IRVerifier, VerificationReport, verify_ir, verify_ir_with_state_dict

__all__ = ["IRVerifier", "VerificationReport", "_compare_tensors", "verify_ir", "verify_ir_with_state_dict"]
