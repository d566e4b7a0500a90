// Attention, one head after the other; the scores of some queries at a time stay near.

#include "products.h"
#include "softmax.h"

// out, scores <- softmax(query @ key^T * scale) @ value, scores.
// Settings: batch, heads, queries, keys, width, width of values, then strides by (batch, head, token) of query, key,
// value and out, and the scale.
KERNEL(attend) {
  const Setting *s = settings, *strides = settings + 6;
  ptrdiff_t batch = s[0].whole, heads = s[1].whole, queries = s[2].whole, keys = s[3].whole;
  ptrdiff_t width = s[4].whole, values = s[5].whole;
  float scale = (float)s[18].real;
  float *scores = (float *)operands[1];
  float *panels = panels_for(width > keys ? width : keys, keys > values ? keys : values);
  for (ptrdiff_t b = 0; b < batch; b++)
    for (ptrdiff_t h = 0; h < heads; h++, scores += queries * keys) {
      auto at = [&](int operand, int of) {
        return (float *)operands[operand] + b * strides[3 * of].whole + h * strides[3 * of + 1].whole;
      };
      const float *query = at(2, 0), *key = at(3, 1), *value = at(4, 2);
      fill_panels(panels, key, width, keys, 1, strides[5].whole);
      multiply_all({queries, keys, width, query, strides[2].whole, 1, panels, scores, keys}, {});
      for (ptrdiff_t row = 0; row < queries; row++) weigh(scores + row * keys, scores + row * keys, keys, scale);
      fill_panels(panels, value, keys, values, strides[8].whole, 1);
      multiply_all({queries, values, keys, scores, keys, 1, panels, at(0, 3), strides[11].whole}, {});
    }
}

constexpr ptrdiff_t QUERIES = 64;  // whose scores are computed at a time

// A row becomes the softmax of row * scale + mask. All of it is -inf: then all is 0, as in torch's kernel with a mask.
static void weigh_masked(float *row, const float *mask, ptrdiff_t keys, float scale) {
  Vector most = spread(-INFINITY);
  ptrdiff_t at = 0;
  for (; at + LANES <= keys; at += LANES) {
    Vector score = load(row + at) * scale + load(mask + at);
    most = larger(most, score);
    store(row + at, score);
  }
  bool is_masked = largest_of(most) == -INFINITY;
  for (; at < keys; at++) {
    row[at] = row[at] * scale + mask[at];
    is_masked &= row[at] == -INFINITY;
  }
  if (is_masked)
    memset(row, 0, 4 * keys);
  else
    weigh(row, row, keys, 1);
}

// The rows of a mask: `strides` apart by (batch, head, query).
struct Mask {
  const float *first;
  const Setting *strides;
  const float *row(ptrdiff_t b, ptrdiff_t h, ptrdiff_t query) const {
    return first + b * strides[0].whole + h * strides[1].whole + query * strides[2].whole;
  }
};

// A number of a mask that hides a key: where another key is not hidden, its weight is 0 for every score far from overflow.
constexpr float HIDDEN = -1e38f;

// How many keys from the first one on are to be read: the ones after that are hidden from every query, as the free rows of
// a cache are. All of them where a query sees no key, since a softmax of equal numbers is their mean.
static ptrdiff_t count_seen(const Mask &mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t queries, ptrdiff_t keys) {
  ptrdiff_t seen = 0, rows = mask.strides[2].whole ? queries : 1;
  for (ptrdiff_t query = 0; query < rows; query++) {
    const float *row = mask.row(b, h, query);
    ptrdiff_t last = keys;
    while (last > 0 && row[last - 1] <= HIDDEN) last--;
    if (last == 0) return keys;
    if (last > seen) seen = last;
  }
  return seen;
}

// out <- softmax(query @ key^T * scale + mask) @ value.
// Settings: batch, heads, queries, keys, width, then strides by (batch, head, token) of query, key, value and out, the
// scale, has a mask, and its strides by (batch, head, query).
KERNEL(attend_all) {
  const Setting *s = settings, *strides = settings + 5;
  ptrdiff_t batch = s[0].whole, heads = s[1].whole, queries = s[2].whole, all = s[3].whole, width = s[4].whole;
  float scale = (float)s[17].real;
  bool has_mask = s[18].whole;
  static thread_local std::vector<float> of_keys, scores;
  Mask mask = {has_mask ? (const float *)operands[4] : nullptr, settings + 19};
  size_t room = width * ((all + PANEL - 1) / PANEL * PANEL) + LANES;
  if (of_keys.size() < room) of_keys.resize(room);
  if (scores.size() < (size_t)(QUERIES * all + LANES)) scores.resize(QUERIES * all + LANES);
  float *of_values = panels_for(all, width);
  for (ptrdiff_t b = 0; b < batch; b++)
    for (ptrdiff_t h = 0; h < heads; h++) {
      auto at = [&](int operand, int of) {
        return (float *)operands[operand] + b * strides[3 * of].whole + h * strides[3 * of + 1].whole;
      };
      ptrdiff_t keys = has_mask ? count_seen(mask, b, h, queries, all) : all;
      fill_panels(of_keys.data(), at(2, 1), width, keys, 1, strides[5].whole);
      fill_panels(of_values, at(3, 2), keys, width, strides[8].whole, 1);
      for (ptrdiff_t first = 0; first < queries; first += QUERIES) {
        ptrdiff_t rows = queries - first < QUERIES ? queries - first : QUERIES;
        ptrdiff_t query_row = strides[2].whole, out_row = strides[11].whole;
        multiply_all({rows, keys, width, at(1, 0) + first * query_row, query_row, 1, of_keys.data(), scores.data(), keys}, {});
        for (ptrdiff_t i = 0; i < rows; i++) {
          float *row = scores.data() + i * keys;
          if (has_mask)
            weigh_masked(row, mask.row(b, h, first + i), keys, scale);
          else
            weigh(row, row, keys, scale);
        }
        multiply_all({rows, width, keys, scores.data(), keys, 1, of_values, at(0, 3) + first * out_row, out_row}, {});
      }
    }
}
