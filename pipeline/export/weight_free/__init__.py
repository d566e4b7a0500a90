"""Models whose weights stay in the files of a checkpoint: a module is made without them, and its model refers to them.

meta_init.py         modules on torch's meta device: parameters without data, buffers with theirs
shards.py            where the tensors of a checkpoint lie: file, offset, length, shape, dtype
external_weights.py  names of the parameters in a checkpoint; initializers → references to those bytes
"""
