"""This folder goes to the front of PYTHONPATH, so that Python children begin with `sitecustomize.py`."""
