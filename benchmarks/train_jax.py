"""The train step of an MLP in JAX: one jitted function whose states are donated. A program of its own interpreter.

    PYTHON benchmarks/train_jax.py FILE

PYTHON has jax, and need not have torch. FILE (.npz) has the batch, `input` and `target`, and the layers as `weight_N`
(columns, inner) and `bias_N`. For each line of standard input, `losses N` or `seconds N`, it does N steps and writes
their losses or the seconds that they took.
"""

import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

RATE, FIRST, SECOND, EPSILON = 1e-3, 0.9, 0.999, 1e-8
"""Of torch.optim.Adam by default."""


def compute_loss(layers, x, target):
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight.T + bias)
    weight, bias = layers[-1]
    chances = jax.nn.log_softmax(x @ weight.T + bias)
    return -jnp.take_along_axis(chances, target[:, None], 1).mean()


def do_step(state, x, target):
    layers, first, second, count = state
    loss, gradients = jax.value_and_grad(compute_loss)(layers, x, target)
    count = count + 1
    first = jax.tree.map(lambda old, new: FIRST * old + (1 - FIRST) * new, first, gradients)
    second = jax.tree.map(lambda old, new: SECOND * old + (1 - SECOND) * new * new, second, gradients)
    rate, root = RATE / (1 - FIRST**count), jnp.sqrt(1 - SECOND**count)
    layers = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) / root + EPSILON), layers, first, second)
    return (layers, first, second, count), loss


def main(path):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # XLA has as many threads as it sees cores
    found = np.load(path)
    x, target = jnp.asarray(found["input"]), jnp.asarray(found["target"])
    count = sum(name.startswith("weight_") for name in found)
    layers = [(jnp.asarray(found[f"weight_{n}"]), jnp.asarray(found[f"bias_{n}"])) for n in range(count)]
    zeros = jax.tree.map(jnp.zeros_like, layers)
    state = layers, zeros, jax.tree.map(jnp.zeros_like, layers), jnp.zeros(())
    step = jax.jit(do_step, donate_argnums=0)
    for line in sys.stdin:
        asked, steps = line.split()
        losses, start = [], time.perf_counter()
        for _ in range(int(steps)):
            state, loss = step(state, x, target)
            if asked == "losses":
                losses.append(float(loss))
        jax.block_until_ready(state)
        print(*(losses if asked == "losses" else [time.perf_counter() - start]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
