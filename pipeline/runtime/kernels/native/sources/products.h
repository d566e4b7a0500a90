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

constexpr ptrdiff_t NEAR = 1 << 16;  // numbers of a matrix that is near as a whole

typedef Vector Pair[2];

// Rows of the left matrix, a panel, and what is read after it: that comes nearer by `ahead` numbers for each row of the panel.
// The numbers of a row may lie in several `stretches` of `depth` numbers, `stretch` apart.
struct Factors {
  const float *left;
  ptrdiff_t row, inner;
  const float *panel;
  ptrdiff_t depth;
  const float *next = nullptr;
  ptrdiff_t ahead = 0, stretches = 1, stretch = 0;
};

// Where sums go, and what is done to them in their registers: a bias, numbers that are there already, another matrix, ReLU.
struct End {
  float *out;
  ptrdiff_t row = PANEL;
  const float *bias = nullptr;
  bool continues = false;
  const float *other = nullptr;
  ptrdiff_t other_row = 0;
  bool relu = false;
};

template <int ROWS>
static void multiply(const Factors &of, const End &end) {
  Vector sums[ROWS][2] = {};
  const float *__restrict panel = of.panel, *next = of.next;
  ptrdiff_t row = of.row, inner = of.inner, ahead = of.ahead;
  for (ptrdiff_t at = 0; at < of.stretches; at++) {
    const float *__restrict left = of.left + at * of.stretch;
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
  }
  auto add = [&](const float *from, ptrdiff_t apart) {
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) sums[i][0] += load(from + i * apart), sums[i][1] += load(from + i * apart + LANES);
  };
  if (end.bias) add(end.bias, 0);
  if (end.continues) add(end.out, end.row);
  if (end.other) add(end.other, end.other_row);
  if (end.relu)
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
      for (int half = 0; half < 2; half++) sums[i][half] = activate(Activation::relu, sums[i][half], nullptr);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++) store(end.out + i * end.row, sums[i][0]), store(end.out + i * end.row + LANES, sums[i][1]);
}

typedef void Multiply(const Factors &, const End &);

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
  ptrdiff_t whole = column == 1 ? columns / PANEL * PANEL : 0;
  // Few rows at a time, which are read in order, and written to each panel side by side.
  for (ptrdiff_t start = 0; start < depth; start += LANES) {
    ptrdiff_t end = start + LANES < depth ? start + LANES : depth;
    for (ptrdiff_t first = 0; first < whole; first += PANEL)
      for (ptrdiff_t k = start; k < end; k++) memcpy(to + first * depth + k * PANEL, from + k * row + first, 4 * PANEL);
  }
  for (ptrdiff_t first = whole; first < columns; first += PANEL)
    for (ptrdiff_t half = 0; half < PANEL; half += LANES)
      fill_half(to + first * depth + half, from + (first + half) * column, depth, columns - first - half, row, column);
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

// A tile of the result.
struct Tile {
  ptrdiff_t first, rows, column, columns;
  bool begins, ends;  // the sums hold the first numbers of the rows, or the last ones
};

// Sums that need more than `End` does: few columns, other activations, or a sum after an activation.
static void finish(const Product &t, const After &after, const Tile &tile, const Pair *sums) {
  for (int half = 0; half < 2; half++) {
    ptrdiff_t place = tile.column + half * LANES, left = tile.columns - half * LANES;
    if (left <= 0) return;
    auto read = [=](const float *from) { return load_up_to(from, left); };
    Vector bias = tile.ends && after.bias ? read(after.bias + place) : Vector{};
    float *out = t.out + tile.first * t.out_row + place;
    bool adds = after.other && (after.adds_first ? tile.begins : tile.ends);
    const float *other = after.other + tile.first * after.other_row + place;
    for (ptrdiff_t i = 0; i < tile.rows; i++, out += t.out_row, other += after.other_row) {
      Vector x = sums[i][half] + bias;
      if (!tile.begins) x += read(out);
      if (adds && after.adds_first) x += read(other);
      if (tile.ends) x = activate(after.activation, x, after.numbers);
      if (adds && !after.adds_first) x += read(other);
      store_up_to(out, x, left);
    }
  }
}

static void multiply_tile(const Product &t, const After &after, const Tile &tile, const Factors &of) {
  bool plain = !tile.ends || after.activation == Activation::none, relu = !plain && after.activation == Activation::relu;
  bool adds = after.other && (after.adds_first ? tile.begins : tile.ends);
  if (tile.columns < PANEL || !(plain || (relu && (after.adds_first || !adds)))) {
    Pair sums[TILE];
    MULTIPLY[tile.rows](of, {(float *)sums});
    return finish(t, after, tile, sums);
  }
  MULTIPLY[tile.rows](of, {t.out + tile.first * t.out_row + tile.column, t.out_row,
                           tile.ends && after.bias ? after.bias + tile.column : nullptr, !tile.begins,
                           adds ? after.other + tile.first * after.other_row + tile.column : nullptr, after.other_row, relu});
}

static bool overlap(const Product &t, const After &after) {
  return after.other < t.out + t.rows * t.out_row && t.out < after.other + t.rows * after.other_row;
}

constexpr int CHAINS = 4;  // of sums that do not wait for each other: in one chain, each row of a panel waits for the sum before

// One row, whose time is that of reading the panels: they are read in order, which the processor sees by itself.
static void multiply_row(const Product &t, const After &after) {
  for (ptrdiff_t column = 0; column < t.columns; column += PANEL) {
    const float *__restrict panel = t.panels + column * t.depth, *__restrict left = t.left;
    Pair sums[CHAINS] = {};
    ptrdiff_t k = 0;
    for (; k + CHAINS <= t.depth; k += CHAINS)
#pragma GCC unroll 4
      for (int i = 0; i < CHAINS; i++, panel += PANEL) {
        sums[i][0] += left[k + i] * load(panel);
        sums[i][1] += left[k + i] * load(panel + LANES);
      }
    for (; k < t.depth; k++, panel += PANEL) sums[0][0] += left[k] * load(panel), sums[0][1] += left[k] * load(panel + LANES);
    for (int half = 0; half < 2; half++) sums[0][half] += sums[1][half] + (sums[2][half] + sums[3][half]);
    finish(t, after, {0, 1, column, t.columns - column, true, true}, sums);
  }
}

static void multiply_all(const Product &t, const After &after) {
  if (t.rows == 1 && t.inner == 1) return multiply_row(t, after);
  if (after.other && !after.adds_first && t.depth > DEPTH && overlap(t, after)) {
    // Partial sums lie in the result, where they would overwrite what is added at the end.
    static thread_local std::vector<float> held;
    held.resize(t.rows * t.columns);
    for (ptrdiff_t i = 0; i < t.rows; i++) memcpy(&held[i * t.columns], after.other + i * after.other_row, 4 * t.columns);
    return multiply_all(t, {after.bias, held.data(), t.columns, after.activation, after.numbers});
  }
  bool fills = t.depth > DEPTH || t.inner != 1 || t.has_lines() || (t.row % 1024 == 0 && t.rows > 4);
  ptrdiff_t block = t.depth * t.columns <= NEAR ? TILE : BLOCK;  // a matrix that stays near leaves rows and results in order
  for (ptrdiff_t start = 0; start < t.depth; start += DEPTH) {
    ptrdiff_t depth = t.depth - start < DEPTH ? t.depth - start : DEPTH;
    for (ptrdiff_t first = 0; first < t.rows; first += block) {
      ptrdiff_t rows = t.rows - first < block ? t.rows - first : block, tiles = (rows + TILE - 1) / TILE;
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
          multiply_tile(t, after, {first + from(tile), count, column, width, start == 0, start + depth == t.depth}, of);
        }
      }
    }
  }
}
