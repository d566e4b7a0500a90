"""Ten everyday jobs by onnxline, onnxsim, onnxslim and Polygraphy, on files from PyPI packages."""
