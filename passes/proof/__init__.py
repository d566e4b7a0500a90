"""Proof that passes do not change what a model computes: models run against references, in a process of their own.

prover.py, numeric.py                      references, measurements, the protocol of a prover, and proof by
                                           structure alone; proof by running the models
exported_run.py                            what is measured on the exported model, which all others are compared with;
                                           whether a fault in a kept weight would be detected
runs.py                                    runs of models in the proof worker: the one question to it, and both sides
claims.py                                  which values have to be equal, and the part of a model that decides it
draws.py, draw_choice.py                   inputs to draw, and the choice of those on which the reference runs
lookups.py, tables.py, gauges.py           lookups in tables; comparison of rows that no draw reads; probes for coverage
coverage.py                                what the draws covered, and what they missed
numbers.py, precision.py                   the error between two tensors, and the tolerance for it
"""
