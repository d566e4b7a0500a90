"""`python -m torch_ir`."""

from torch_ir.cli import main

if __name__ == "__main__":
    main()
