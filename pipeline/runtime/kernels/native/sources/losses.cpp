// The loss of a classifier and its gradient, row by row: log_softmax, and the negative logarithm of the right class.

#include <cmath>

#include <c10/util/Exception.h>

#include "vectors.h"

// Calls `each(place, numbers)` for all vectors of a row, the last one with `count` numbers.
template <typename Each>
static inline void walk(ptrdiff_t columns, Each each) {
  ptrdiff_t at = 0;
  for (; at + LANES <= columns; at += LANES) each(at, (ptrdiff_t)LANES);
  if (at < columns) each(at, columns - at);
}

// The first `count` lanes of x; the others are `rest`.
static inline Vector fill_lanes(Vector x, ptrdiff_t count, float rest) {
  Whole lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  return lane < (int32_t)count ? x : spread(rest);
}

// out <- x - max - log(sum(exp(x - max))), over each row.  Settings: rows, columns, row stride of x.
KERNEL(log_softmax_rows) {
  ptrdiff_t rows = settings[0].whole, columns = settings[1].whole;
  float *out = (float *)operands[0];
  const float *x = (const float *)operands[1];
  for (ptrdiff_t row = 0; row < rows; row++, out += columns, x += settings[2].whole) {
    Vector most = spread(-INFINITY), sums = {};
    walk(columns, [&](ptrdiff_t at, ptrdiff_t count) {
      most = larger(most, fill_lanes(load_up_to(x + at, count), count, -INFINITY));
    });
    float top = largest_of(most);
    walk(columns, [&](ptrdiff_t at, ptrdiff_t count) {
      sums += fill_lanes(exp(load_up_to(x + at, count) - top), count, 0);
    });
    float logarithm = std::log(sum_of(sums));
    walk(columns, [&](ptrdiff_t at, ptrdiff_t count) {
      store_up_to(out + at, load_up_to(x + at, count) - top - logarithm, count);
    });
  }
}

// out <- gradient - exp(output) * sum(gradient), over each row.  Settings: rows, columns, row strides of both.
KERNEL(log_softmax_gradient) {
  ptrdiff_t rows = settings[0].whole, columns = settings[1].whole;
  float *out = (float *)operands[0];
  const float *gradient = (const float *)operands[1], *output = (const float *)operands[2];
  for (ptrdiff_t row = 0; row < rows; row++) {
    Vector sums = {};
    walk(columns, [&](ptrdiff_t at, ptrdiff_t count) { sums += load_up_to(gradient + at, count); });
    float sum = sum_of(sums);
    walk(columns, [&](ptrdiff_t at, ptrdiff_t count) {
      Vector share = exp(load_up_to(output + at, count)) * sum;
      store_up_to(out + at, load_up_to(gradient + at, count) - share, count);
    });
    out += columns, gradient += settings[2].whole, output += settings[3].whole;
  }
}

enum class Reduction : int64_t { none, mean, sum };

// Labels of rows: each is a class, or the one number that is ignored.
struct Labels {
  const int64_t *of;
  ptrdiff_t classes;
  int64_t ignored;

  bool counts(ptrdiff_t row) const {
    if (of[row] == ignored) return false;
    TORCH_CHECK_INDEX(of[row] >= 0 && of[row] < classes, "Target ", of[row], " is out of bounds.");
    return true;
  }
};

// out, rows that count <- minus the numbers of the right classes; their mean or sum, or each of them.
// Settings: rows, columns, row stride of the numbers, the ignored label, the reduction.
KERNEL(class_loss) {
  const Setting *s = settings;
  float *out = (float *)operands[0], *total = (float *)operands[1];
  const float *x = (const float *)operands[2];
  Labels labels = {(const int64_t *)operands[3], s[1].whole, s[3].whole};
  auto reduction = (Reduction)s[4].whole;
  double sum = 0, counted = 0;
  for (ptrdiff_t row = 0; row < s[0].whole; row++) {
    float loss = 0;
    if (labels.counts(row)) loss = -x[row * s[2].whole + labels.of[row]], counted++;
    if (reduction == Reduction::none) out[row] = loss;
    sum += loss;
  }
  if (reduction != Reduction::none) *out = (float)(reduction == Reduction::mean ? sum / counted : sum);
  *total = reduction == Reduction::none ? 0 : (float)counted;
}

// out <- the gradient of class_loss: 0 but at the right classes.  Settings: rows, columns, the ignored label, the reduction.
KERNEL(class_loss_gradient) {
  const Setting *s = settings;
  ptrdiff_t rows = s[0].whole, columns = s[1].whole;
  float *out = (float *)operands[0];
  const float *gradient = (const float *)operands[1], *total = (const float *)operands[3];
  Labels labels = {(const int64_t *)operands[2], columns, s[2].whole};
  auto reduction = (Reduction)s[3].whole;
  memset(out, 0, 4 * rows * columns);
  for (ptrdiff_t row = 0; row < rows; row++) {
    if (!labels.counts(row)) continue;
    float own = reduction == Reduction::none ? gradient[row] : *gradient;
    out[row * columns + labels.of[row]] = -(reduction == Reduction::mean ? own / *total : own);
  }
}
