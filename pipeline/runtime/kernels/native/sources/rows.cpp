// What is computed row by row: normalisations and softmax.

#include <cmath>

#include "softmax.h"

// out <- (x - mean) / sqrt(variance + epsilon) * scale + bias, over each row; where it is not centered, the mean is taken for 0.
// Settings: rows, columns, row stride of x, how many of scale and bias there are, is centered, epsilon.
KERNEL(normalize_rows) {
  ptrdiff_t rows = settings[0].whole, columns = settings[1].whole, stride = settings[2].whole;
  float *out = (float *)operands[0];
  const float *x = (const float *)operands[1];
  const float *scale = settings[3].whole ? (const float *)operands[2] : nullptr;
  const float *bias = settings[3].whole > 1 ? (const float *)operands[3] : nullptr;
  bool is_centered = settings[4].whole;
  double epsilon = settings[5].real;
  ptrdiff_t even = columns / LANES * LANES, rest = columns - even;
  for (ptrdiff_t row = 0; row < rows; row++, x += stride, out += columns) {
    Vector sums[4] = {}, squares[4] = {};
    ptrdiff_t at = 0;
    for (; at + 4 * LANES <= even; at += 4 * LANES)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) sums[i] += load(x + at + i * LANES);
    for (; at < even; at += LANES) sums[0] += load(x + at);
    if (rest) sums[1] += load_some(x + at, rest);
    float mean = is_centered ? sum_of(sums[0] + sums[1] + (sums[2] + sums[3])) / columns : 0.0f;
    for (at = 0; at + 4 * LANES <= even; at += 4 * LANES)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        Vector away = load(x + at + i * LANES) - mean;
        squares[i] += away * away;
      }
    for (; at < even; at += LANES) {
      Vector away = load(x + at) - mean;
      squares[0] += away * away;
    }
    float square = 0;
    for (; at < columns; at++) square += (x[at] - mean) * (x[at] - mean);
    square += sum_of(squares[0] + squares[1] + (squares[2] + squares[3]));
    float factor = (float)(1 / std::sqrt((double)square / columns + epsilon));
    for (at = 0; at < columns; at += LANES) {
      ptrdiff_t count = columns - at;
      if (count >= LANES) {
        Vector y = (load(x + at) - mean) * factor;
        if (scale) y *= load(scale + at);
        store(out + at, bias ? y + load(bias + at) : y);
      } else {
        Vector y = (load_some(x + at, count) - mean) * factor;
        if (scale) y *= load_some(scale + at, count);
        store_some(out + at, bias ? y + load_some(bias + at, count) : y, count);
      }
    }
  }
}

// out <- softmax of each row.  Settings: rows, columns, row stride of x.
KERNEL(softmax_rows) {
  ptrdiff_t rows = settings[0].whole, columns = settings[1].whole;
  float *out = (float *)operands[0];
  const float *x = (const float *)operands[1];
  for (ptrdiff_t row = 0; row < rows; row++, out += columns, x += settings[2].whole) weigh(out, x, columns, 1);
}
