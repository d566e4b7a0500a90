// Gradients of what is computed number by number, and sums over rows.

#include "vectors.h"

// out <- 0 where x is at most the threshold, else the gradient.  Settings: how many, the threshold.
KERNEL(pass_above) {
  ptrdiff_t count = settings[0].whole, at = 0;
  float threshold = (float)settings[1].real;
  float *out = (float *)operands[0];
  const float *gradient = (const float *)operands[1], *x = (const float *)operands[2];
  auto pass = [&](Vector own, Vector of) { return of <= threshold ? Vector{} : own; };
  for (; at + LANES <= count; at += LANES) store(out + at, pass(load(gradient + at), load(x + at)));
  if (ptrdiff_t left = count - at; left)
    store_some(out + at, pass(load_some(gradient + at, left), load_some(x + at, left)), left);
}

constexpr int SUMS = 8;  // vectors of columns that are summed at a time

// out <- sum over rows of factor[row] * x[row].  Settings: rows, columns, row stride of x.
KERNEL(weigh_rows) {
  ptrdiff_t rows = settings[0].whole, columns = settings[1].whole, stride = settings[2].whole, at = 0;
  float *out = (float *)operands[0];
  const float *x = (const float *)operands[1], *factors = (const float *)operands[2];
  for (; at + SUMS * LANES <= columns; at += SUMS * LANES) {
    Vector sums[SUMS] = {};
    for (ptrdiff_t row = 0; row < rows; row++)
#pragma GCC unroll 8
      for (int i = 0; i < SUMS; i++) sums[i] += load(x + row * stride + at + i * LANES) * factors[row];
    for (int i = 0; i < SUMS; i++) store(out + at + i * LANES, sums[i]);
  }
  for (; at < columns; at += LANES) {
    ptrdiff_t left = columns - at;
    Vector sum = {};
    for (ptrdiff_t row = 0; row < rows; row++)
      sum += load_up_to(x + row * stride + at, left) * factors[row];
    store_up_to(out + at, sum, left);
  }
}
