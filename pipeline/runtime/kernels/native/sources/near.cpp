// Products of matrices that are in a near cache: both are read where they lie, and a tile of sums goes from registers into
// the result. To bring such a matrix into panels takes a tenth of the product.

#include <cmath>

#include "products.h"

struct NearProduct {
  ptrdiff_t rows, columns, depth;
  const float *left;
  ptrdiff_t row, inner;
  const float *right;
  ptrdiff_t step, next;  // from row to row, and from panel to panel
  float *out;
  const float *bias, *gate;  // one number for each column; a matrix like the result, or null
  float floor;
};

// One tile: `last` columns of its last vector are there.
template <int ROWS, int VECTORS>
static void multiply_near(const NearProduct &t, ptrdiff_t first, ptrdiff_t column, ptrdiff_t last) {
  constexpr ptrdiff_t END = (VECTORS - 1) * LANES;
  const float *__restrict left = t.left + first * t.row, *__restrict right = t.right + column / PANEL * t.next;
  ptrdiff_t row = t.row;
  Vector sums[ROWS][VECTORS] = {};
  for (ptrdiff_t k = 0; k < t.depth; k++, right += t.step, left += t.inner) {
    Vector end = VECTORS == 1 || last < LANES ? load_up_to(right + END, last) : load(right + END);
    Vector ahead = VECTORS == 1 ? end : load(right);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      float x = left[i * row];
      sums[i][0] += x * ahead;
      if (VECTORS == 2) sums[i][VECTORS - 1] += x * end;
    }
  }
  Vector bias[VECTORS] = {};
  if (t.bias)
    for (int j = 0; j < VECTORS; j++) bias[j] = load_up_to(t.bias + column + j * LANES, j == VECTORS - 1 ? last : LANES);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) {
      ptrdiff_t at = (first + i) * t.columns + column + j * LANES, count = j == VECTORS - 1 ? last : LANES;
      Vector x = sums[i][j] + bias[j];
      x = x < t.floor ? spread(t.floor) : x;
      if (t.gate) x = load_up_to(t.gate + at, count) <= 0.0f ? Vector{} : x;
      store_up_to(t.out + at, x, count);
    }
}

typedef void MultiplyNear(const NearProduct &, ptrdiff_t, ptrdiff_t, ptrdiff_t);

template <size_t... ROWS>
static MultiplyNear *tile_of(ptrdiff_t rows, bool wide, std::index_sequence<ROWS...>) {
  static MultiplyNear *const TILES[][2] = {{multiply_near<ROWS + 1, 1>, multiply_near<ROWS + 1, 2>}...};
  return TILES[rows - 1][wide];
}

// Half of a panel from `width` columns that lie without gaps, square by square; columns beyond them are 0.
template <bool WHOLE>
static void turn_half(float *to, const float *from, ptrdiff_t depth, ptrdiff_t width, ptrdiff_t column) {
  for (ptrdiff_t k = 0; k < depth; k += LANES) {
    ptrdiff_t count = depth - k < LANES ? depth - k : LANES;
    Vector square[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) {
      if (WHOLE && count == LANES)
        square[j] = load(from + j * column + k);
      else
        square[j] = j < width ? load_up_to(from + j * column + k, count) : Vector{};
    }
    turn_square(square);
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++)
      if (j < count) store(to + (k + j) * PANEL, square[j]);
  }
}

static void turn_panels(float *to, const float *from, ptrdiff_t depth, ptrdiff_t columns, ptrdiff_t column) {
  for (ptrdiff_t first = 0; first < columns; first += LANES) {
    float *half = to + first / PANEL * depth * PANEL + first % PANEL;
    if (columns - first < LANES)
      turn_half<false>(half, from + first * column, depth, columns - first, column);
    else
      turn_half<true>(half, from + first * column, depth, LANES, column);
  }
}

// out <- the larger of floor and rows @ matrix + bias; 0 where the gate, the result of a ReLU, is 0.
// Settings: rows, columns, depth, strides of the rows, strides of the matrix (one of them 1), has a bias, has a gate, floor.
KERNEL(multiply_near_matrices) {
  const Setting *s = settings;
  ptrdiff_t columns = s[1].whole, depth = s[2].whole, step = s[5].whole, column = s[6].whole;
  void *const *rest = operands + 3;
  NearProduct t = {s[0].whole, columns,    depth, (const float *)operands[1], s[3].whole, s[4].whole, (const float *)operands[2],
                   step,       PANEL};
  t.out = (float *)operands[0];
  t.bias = s[7].whole ? (const float *)*rest++ : nullptr;
  t.gate = s[8].whole ? (const float *)*rest : nullptr;
  t.floor = (float)s[9].real;
  if (column != 1) {
    float *panels = panels_for(depth, columns);
    turn_panels(panels, t.right, depth, columns, column);
    t.right = panels, t.step = PANEL, t.next = depth * PANEL;
  }
  ptrdiff_t tiles = (t.rows + TILE - 1) / TILE;
  for (ptrdiff_t at = 0; at < columns; at += PANEL) {
    ptrdiff_t width = columns - at < PANEL ? columns - at : PANEL;
    bool wide = width > LANES;
    for (ptrdiff_t tile = 0; tile < tiles; tile++) {
      ptrdiff_t first = tile * t.rows / tiles, count = (tile + 1) * t.rows / tiles - first;
      tile_of(count, wide, std::make_index_sequence<TILE>())(t, first, at, width - wide * LANES);
    }
  }
}
