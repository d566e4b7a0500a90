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

// Rows of the left matrix, a panel, and what is read after it: that comes nearer by `ahead` numbers for each row of the panel.
struct Factors {
  const float *left;
  ptrdiff_t row, inner;
  const float *panel;
  ptrdiff_t depth;
  const float *next = nullptr;
  ptrdiff_t ahead = 0;
};

template <int ROWS>
static void multiply(const Factors &of, Pair *__restrict out) {
  Vector sums[ROWS][2] = {};
  const float *__restrict panel = of.panel, *__restrict left = of.left, *next = of.next;
  ptrdiff_t row = of.row, inner = of.inner, ahead = of.ahead;
  for (ptrdiff_t k = 0; k < of.depth; k++, panel += PANEL, left += inner, next += ahead) {
    __builtin_prefetch(next, 0, 2);
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

typedef void Multiply(const Factors &, Pair *);

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

// What follows a product while it is in registers: a bias for each column, an activation, and another matrix, which is added
// before the activation or after it. `other` may be the memory of the result.
struct After {
  const float *bias, *other;
  ptrdiff_t other_row;
  Activation activation;
  const Setting *numbers;
  bool adds_first = false;
};

// Rows may lie in lines of `width` rows, `line` apart; a width of 0 says that all lie in one line.
struct Product {
  ptrdiff_t rows, columns, depth;
  const float *left;
  ptrdiff_t row, inner;
  const float *panels;
  float *out;
  ptrdiff_t out_row;
  ptrdiff_t width = 0, line = 0;

  bool has_lines() const { return width && width < rows; }
  const float *at(ptrdiff_t i) const { return has_lines() ? left + i / width * line + i % width * row : left + i * row; }
};

// A row of `near_rows` is no power of two long: numbers at such distances push each other out of the cache.
constexpr ptrdiff_t BETWEEN = 16;
static thread_local float near_rows[BLOCK * (DEPTH + BETWEEN)] __attribute__((aligned(64)));

// Rows of a tile from `first` on; where a column lies without gaps, column by column.
static void fill_tile(float *to, const Product &t, ptrdiff_t first, ptrdiff_t count, ptrdiff_t start, ptrdiff_t depth) {
  if (t.row == 1 && !t.has_lines()) {
    const float *source = t.left + first + start * t.inner;
    if (count == TILE)
      for (ptrdiff_t k = 0; k < depth; k++) memcpy(to + k * TILE, source + k * t.inner, 4 * TILE);
    else
      for (ptrdiff_t k = 0; k < depth; k++) memcpy(to + k * count, source + k * t.inner, 4 * count);
    return;
  }
  for (ptrdiff_t i = 0; i < count; i++, to += depth + BETWEEN) {
    const float *source = t.at(first + i) + start * t.inner;
    if (t.inner == 1)
      memcpy(to, source, 4 * depth);
    else
      for (ptrdiff_t k = 0; k < depth; k++) to[k] = source[k * t.inner];
  }
}

// A tile of sums on its way to the result.
struct Tile {
  const Pair *sums;
  ptrdiff_t first, rows, column, columns;
  bool begins, ends;  // the sums hold the first numbers of the rows, or the last ones
};

template <typename Activate>
static inline void finish(const Product &t, const After &after, const Tile &tile, Activate activate) {
  for (int half = 0; half < 2; half++) {
    ptrdiff_t place = tile.column + half * LANES, left = tile.columns - half * LANES;
    if (left <= 0) return;
    bool whole = left >= LANES;
    auto read = [=](const float *from) { return whole ? load(from) : load_some(from, left); };
    Vector bias = tile.ends && after.bias ? read(after.bias + place) : Vector{};
    float *out = t.out + tile.first * t.out_row + place;
    bool adds = after.other && (after.adds_first ? tile.begins : tile.ends);
    const float *other = adds ? after.other + tile.first * after.other_row + place : nullptr;
    for (ptrdiff_t i = 0; i < tile.rows; i++, out += t.out_row) {
      Vector x = tile.sums[i][half] + bias;
      if (!tile.begins) x += read(out);
      if (other && after.adds_first) x += read(other + i * after.other_row);
      if (tile.ends) x = activate(x);
      if (other && !after.adds_first) x += read(other + i * after.other_row);
      if (whole)
        store(out, x);
      else
        store_some(out, x, left);
    }
  }
}

// Bring what the sums will be added to, and written to, near while they are computed.
static void fetch(const Product &t, const After &after, const Tile &tile) {
  bool adds = after.other && after.other != t.out && (after.adds_first ? tile.begins : tile.ends);
  for (ptrdiff_t i = tile.first; i < tile.first + tile.rows; i++) {
    for (int half = 0; half < 2; half++) {
      ptrdiff_t place = tile.column + half * LANES;
      __builtin_prefetch(t.out + i * t.out_row + place, 1);
      if (adds) __builtin_prefetch(after.other + i * after.other_row + place);
    }
  }
}

static void finish_by_kind(const Product &t, const After &after, const Tile &tile) {
  if (after.activation == Activation::none)
    finish(t, after, tile, [](Vector x) { return x; });
  else if (after.activation == Activation::relu)
    finish(t, after, tile, [](Vector x) { return activate(Activation::relu, x, nullptr); });
  else
    finish(t, after, tile, [&](Vector x) { return activate(after.activation, x, after.numbers); });
}

static bool overlap(const Product &t, const After &after) {
  return after.other < t.out + t.rows * t.out_row && t.out < after.other + t.rows * after.other_row;
}

static void multiply_all(const Product &t, const After &after) {
  if (after.other && !after.adds_first && t.depth > DEPTH && overlap(t, after)) {
    // Partial sums lie in the result, where they would overwrite what is added at the end.
    static thread_local std::vector<float> held;
    held.resize(t.rows * t.columns);
    for (ptrdiff_t i = 0; i < t.rows; i++) memcpy(&held[i * t.columns], after.other + i * after.other_row, 4 * t.columns);
    return multiply_all(t, {after.bias, held.data(), t.columns, after.activation, after.numbers});
  }
  bool fills = t.depth > DEPTH || t.inner != 1 || t.has_lines() || (t.row % 1024 == 0 && t.rows > 4);
  for (ptrdiff_t start = 0; start < t.depth; start += DEPTH) {
    ptrdiff_t depth = t.depth - start < DEPTH ? t.depth - start : DEPTH;
    for (ptrdiff_t first = 0; first < t.rows; first += BLOCK) {
      ptrdiff_t rows = t.rows - first < BLOCK ? t.rows - first : BLOCK, tiles = (rows + TILE - 1) / TILE;
      auto from = [=](ptrdiff_t tile) { return tile * rows / tiles; };
      if (fills)
        for (ptrdiff_t tile = 0; tile < tiles; tile++)
          fill_tile(near_rows + from(tile) * (depth + BETWEEN), t, first + from(tile), from(tile + 1) - from(tile), start, depth);
      for (ptrdiff_t column = 0; column < t.columns; column += PANEL) {
        const float *panel = t.panels + column * t.depth + start * PANEL;
        ptrdiff_t width = t.columns - column < PANEL ? t.columns - column : PANEL;
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
          ptrdiff_t count = from(tile + 1) - from(tile);
          Factors of = {t.left + (first + from(tile)) * t.row + start * t.inner, t.row, t.inner, panel, depth};
          if (fills) {
            bool turned = t.row == 1 && !t.has_lines();
            of.left = near_rows + from(tile) * (depth + BETWEEN);
            of.row = turned ? 1 : depth + BETWEEN, of.inner = turned ? count : 1;
          }
          // The panel after this one, a part with each tile.
          of.ahead = PANEL / tiles;
          of.next = panel + PANEL * t.depth + tile * of.ahead * depth;
          Pair sums[TILE];
          Tile found = {sums, first + from(tile), count, column, width, start == 0, start + depth == t.depth};
          fetch(t, after, found);
          MULTIPLY[count](of, sums);
          finish_by_kind(t, after, found);
        }
      }
    }
  }
}
