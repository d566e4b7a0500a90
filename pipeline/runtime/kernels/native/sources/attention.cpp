// Attention over few tokens: the scores of one head after the other, which stay near.

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
