// What is computed number by number.

#include "activations.h"

// out <- activation(x).  Settings: how many, the activation and its numbers.
KERNEL(activate_all) {
  float *out = (float *)operands[0];
  const float *x = (const float *)operands[1];
  ptrdiff_t count = settings[0].whole, at = 0;
  auto activation = (Activation)settings[1].whole;
  for (; at + LANES <= count; at += LANES) store(out + at, activate(activation, load(x + at), settings + 2));
  if (at < count) store_some(out + at, activate(activation, load_some(x + at, count - at), settings + 2), count - at);
}
