"""Is this release of an optimizer safe? Try every pass on many small models, and judge the results.

    cases ──▶ attempts (the raw library, in a worker) ──▶ judge (in another) ──▶ findings ──▶ tables, reproducers

The library is called as its users call it, without our pins and repairs. The judge shares no code with any pass:
ONNX's checker and reference evaluator, and onnxruntime without graph optimization. The method is that of OODTE
(arXiv 2505.01892), differential testing of an optimizer pass by pass; docs/how-to/audit.md compares.
"""
