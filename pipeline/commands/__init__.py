"""The commands of `onnxline`, one file each."""
