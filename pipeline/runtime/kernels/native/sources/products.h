// Products of matrices, in tiles of rows and of a panel of columns that stay in registers.
//
// A panel is two vectors of columns, (inner, 2 * LANES), so that a tile reads its matrix in order.

#pragma once

#include <vector>

#include "activations.h"

constexpr int PANEL = 2 * LANES;
#if defined(__AVX512F__)
constexpr int TILE = 14;  // 28 of 32 registers hold sums
#else
constexpr int TILE = 6;  // 12 of 16
#endif
constexpr ptrdiff_t DEPTH = 512, BLOCK = 8 * TILE;  // rows of a panel, and of the left matrix, that are near at a time

typedef Vector Pair[2];

template <int ROWS>
static void multiply(const float *__restrict left, ptrdiff_t row, ptrdiff_t inner, const float *__restrict panel,
                     ptrdiff_t step, ptrdiff_t depth, Pair *__restrict out) {
  Vector sums[ROWS][2] = {};
  for (ptrdiff_t k = 0; k < depth; k++, panel += step, left += inner) {
    Vector first = load(panel), second = load(panel + LANES);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      float x = left[i * row];
      sums[i][0] += x * first;
      sums[i][1] += x * second;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++) out[i][0] = sums[i][0], out[i][1] = sums[i][1];
}

typedef void Multiply(const float *, ptrdiff_t, ptrdiff_t, const float *, ptrdiff_t, ptrdiff_t, Pair *);

static Multiply *const MULTIPLY[] = {
    nullptr,     multiply<1>, multiply<2>, multiply<3>,  multiply<4>,  multiply<5>,  multiply<6>,
#if defined(__AVX512F__)
    multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>, multiply<13>, multiply<14>,
#endif
};

// Half of a panel from columns that lie anywhere: square by square where each column lies without gaps.
static void fill_half(float *to, const float *from, ptrdiff_t depth, ptrdiff_t width, ptrdiff_t row, ptrdiff_t column) {
  ptrdiff_t k = 0;
  if (row == 1 && width >= LANES)
    for (; k + LANES <= depth; k += LANES) {
      Vector square[LANES];
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) square[j] = load(from + j * column + k);
      turn_square(square);
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) store(to + (k + j) * PANEL, square[j]);
    }
  for (; k < depth; k++)
    for (ptrdiff_t j = 0; j < LANES; j++) to[k * PANEL + j] = j < width ? from[k * row + j * column] : 0;
}

// A matrix of (depth, columns) in panels; columns beyond the last one are 0.
static void fill_panels(float *to, const float *from, ptrdiff_t depth, ptrdiff_t columns, ptrdiff_t row, ptrdiff_t column) {
  for (ptrdiff_t first = 0; first < columns; first += PANEL, to += depth * PANEL) {
    ptrdiff_t width = columns - first < PANEL ? columns - first : PANEL;
    const float *source = from + first * column;
    if (column == 1 && width == PANEL) {
      for (ptrdiff_t k = 0; k < depth; k++) memcpy(to + k * PANEL, source + k * row, 4 * PANEL);
      continue;
    }
    for (ptrdiff_t half = 0; half < PANEL; half += LANES) fill_half(to + half, source + half * column, depth, width - half, row, column);
  }
}

// Panels of matrices that change from run to run. It grows to the largest one of a thread, and then stays.
static inline float *panels_for(ptrdiff_t depth, ptrdiff_t columns) {
  static thread_local std::vector<float> held;
  size_t wanted = depth * ((columns + PANEL - 1) / PANEL * PANEL) + LANES;
  if (held.size() < wanted) held.resize(wanted);
  return held.data();
}

// What follows a product while it is in registers: a bias for each column, another matrix, an activation.
struct After {
  const float *bias, *other;
  ptrdiff_t other_row;
  Activation activation;
  const Setting *numbers;

  Vector operator()(Vector x, ptrdiff_t row, ptrdiff_t column, ptrdiff_t count) const {
    if (bias) x += count < LANES ? load_some(bias + column, count) : load(bias + column);
    x = activate(activation, x, numbers);
    const float *added = other + row * other_row + column;
    if (other) x += count < LANES ? load_some(added, count) : load(added);
    return x;
  }
};

struct Product {
  ptrdiff_t rows, columns, depth;
  const float *left;
  ptrdiff_t row, inner;
  const float *panels;
  float *out;
  ptrdiff_t out_row;
};

static thread_local float near_rows[BLOCK * DEPTH] __attribute__((aligned(64)));

// Rows of `block` from `first` on, for tiles: (depth, rows of the tile) one behind the other.
static void fill_rows(const Product &t, ptrdiff_t first, ptrdiff_t rows, ptrdiff_t tiles, ptrdiff_t start, ptrdiff_t depth) {
  for (ptrdiff_t tile = 0; tile < tiles; tile++) {
    ptrdiff_t from = tile * rows / tiles, count = (tile + 1) * rows / tiles - from;
    const float *source = t.left + (first + from) * t.row + start * t.inner;
    float *to = near_rows + from * depth;
    if (t.row == 1)
      for (ptrdiff_t k = 0; k < depth; k++) memcpy(to + k * count, source + k * t.inner, 4 * count);
    else
      for (ptrdiff_t i = 0; i < count; i++)
        for (ptrdiff_t k = 0; k < depth; k++) to[k * count + i] = source[i * t.row + k * t.inner];
  }
}

static void multiply_all(const Product &t, const After &after) {
  // Numbers at distances of powers of two push each other out of the cache.
  bool fills = t.depth > DEPTH || t.inner != 1 || (t.row % 1024 == 0 && t.rows > 4);
  for (ptrdiff_t start = 0; start < t.depth; start += DEPTH) {
    ptrdiff_t depth = t.depth - start < DEPTH ? t.depth - start : DEPTH;
    bool begins = start == 0, ends = start + depth == t.depth;
    for (ptrdiff_t first = 0; first < t.rows; first += BLOCK) {
      ptrdiff_t rows = t.rows - first < BLOCK ? t.rows - first : BLOCK, tiles = (rows + TILE - 1) / TILE;
      if (fills) fill_rows(t, first, rows, tiles, start, depth);
      for (ptrdiff_t column = 0; column < t.columns; column += PANEL) {
        const float *panel = t.panels + column * t.depth + start * PANEL;
        ptrdiff_t width = t.columns - column < PANEL ? t.columns - column : PANEL;
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
          ptrdiff_t from = tile * rows / tiles, count = (tile + 1) * rows / tiles - from;
          Pair sums[TILE];
          if (fills)
            MULTIPLY[count](near_rows + from * depth, 1, count, panel, PANEL, depth, sums);
          else
            MULTIPLY[count](t.left + (first + from) * t.row + start * t.inner, t.row, t.inner, panel, PANEL, depth, sums);
          for (ptrdiff_t i = 0; i < count; i++) {
            ptrdiff_t at = first + from + i;
            for (int half = 0; half < 2; half++) {
              ptrdiff_t place = column + half * LANES, left = width - half * LANES;
              if (left <= 0) continue;
              float *out = t.out + at * t.out_row + place;
              Vector x = sums[i][half];
              if (!begins) x += left < LANES ? load_some(out, left) : load(out);
              if (ends) x = after(x, at, place, left);
              if (left < LANES)
                store_some(out, x, left);
              else
                store(out, x);
            }
          }
        }
      }
    }
  }
}
