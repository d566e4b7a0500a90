"""What a GPU has to show, in one prepared run of at most 8 minutes: `benchmarks/cuda/run.sh`."""
