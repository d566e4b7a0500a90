"""Kernels of ours for CUDA, in Triton: row programs, Adam over all parameters in one launch, the check of indices.

Each kernel has a form in torch, which computes where Triton is not installed, and which the tests judge it by. Triton's
interpreter runs the same kernels on the CPU (`TRITON_INTERPRET=1`). Untested on a GPU.
"""

from pipeline.runtime.kernels.cuda.launches import has_triton, launch_adam, launch_clamp, launch_row_program
