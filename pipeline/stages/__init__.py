"""The stages of `pipeline.model_run`, one file each: data in, data out, files through the workspace. No stage prints.

source.py       makes the module or opens the file     (the stage `reference` is `pipeline/verify/references.py`)
export.py       torch → ONNX, compared with the reference
passes.py       the recipe, each pass proven; report.py draws what it did
runtime.py      import, lower, plan, run

check.py comes before all of them, and report.py after; source.py says where weights are.
"""
