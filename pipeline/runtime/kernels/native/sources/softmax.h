// Softmax of a row of numbers.
#pragma once

#include <cmath>

#include "vectors.h"

// A row becomes the softmax of row * scale, which is not negative. All of it is -inf, or some of it NaN: then all is NaN, as in
// torch. The largest number is subtracted before the product: a product that is fused with the difference is not rounded as
// the largest one was, so of large numbers e to the hundreds would be left.
static inline void weigh(float *out, const float *x, ptrdiff_t columns, float scale) {
  ptrdiff_t at = 0;
  Vector most = spread(-INFINITY);
  for (; at + LANES <= columns; at += LANES) most = larger(most, load(x + at));
  float top = largest_of(most);
  for (; at < columns; at++) top = x[at] > top || x[at] != x[at] ? x[at] : top;
  Vector sums = {};
  float sum = 0;
  for (at = 0; at + LANES <= columns; at += LANES) {
    Vector weight = exp((load(x + at) - top) * scale);
    sums += weight;
    store(out + at, weight);
  }
  if (ptrdiff_t count = columns - at; count) {
    Vector weight = exp((load_some(x + at, count) - top) * scale);
    store_some(out + at, weight, count);
    for (ptrdiff_t i = 0; i < count; i++) sum += weight[i];
  }
  sum += sum_of(sums);
  float share = 1 / sum;
  if (top == -INFINITY || top != top) share = NAN;
  for (at = 0; at + LANES <= columns; at += LANES) store(out + at, load(out + at) * share);
  for (; at < columns; at++) out[at] *= share;
}
