"""Proof that passes change nothing: models against references, in a process of its own, and no more than has to be run.

prover.py, numeric.py                      what a run asks; the proof by structure alone, and the one by numbers
client.py, server.py                       every call of the proof worker; what runs there
types.py                                   references, measurements, and what the worker is asked for
claims.py, part.py, data_movement.py       which values have to be equal, and the pieces of models that show it
draws.py, draw_choice.py                   the inputs that are drawn, and which of them the reference bears
lookups.py, tables.py, gauges.py           what is read of tables; what a run tells of itself beside its outputs
coverage.py                                what the draws have shown, and what they could not
fault_injection.py                         whether a fault in a kept weight would be seen
numbers.py, precision.py                   how far apart two tensors are, and how far they may be
"""
