// Updates of parameters by their gradients, as torch's fused optimizers do them, and the scalars around them.

#include <cmath>

#include "vectors.h"

// The root of x, to the last digit.
static inline Vector root(Vector x) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(x);
#else
  for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

enum class Decay : int64_t { none, added, decoupled };

// The numbers of one update by Adam, which follow from its settings, the count of the step and the learning rate. What
// torch's kernel divides by the root of the bias correction is multiplied by `share`: one division for each number.
struct Adam {
  float add_first, keep_second, add_second, sign, decay, shrink, rate, share, epsilon;

  // Both moments and the largest second one (AMSGrad) become the new ones.  Returns the new parameter.
  template <Decay DECAY, bool LARGEST>
  Vector update(Vector param, Vector gradient, Vector &first, Vector &second, Vector &largest) const {
    gradient *= sign;
    if (DECAY == Decay::added) gradient += decay * param;
    if (DECAY == Decay::decoupled) param *= shrink;
    first += add_first * (gradient - first);
    second = keep_second * second + add_second * gradient * gradient;
    largest = LARGEST ? larger(largest, second) : second;
    return param - rate * (first / (root(largest) * share + epsilon));
  }
};

template <Decay DECAY, bool LARGEST>
static void update_all(const Adam &adam, void *const *operands, ptrdiff_t count) {
  float *param = (float *)operands[0], *first = (float *)operands[1], *second = (float *)operands[2];
  float *largest = LARGEST ? (float *)operands[3] : nullptr;
  const float *gradient = (const float *)operands[3 + LARGEST];
  ptrdiff_t at = 0;
  for (; at + LANES <= count; at += LANES) {
    Vector one = load(first + at), two = load(second + at), top = LARGEST ? load(largest + at) : two;
    store(param + at, adam.update<DECAY, LARGEST>(load(param + at), load(gradient + at), one, two, top));
    store(first + at, one);
    store(second + at, two);
    if (LARGEST) store(largest + at, top);
  }
  if (ptrdiff_t left = count - at; left) {
    Vector one = load_some(first + at, left), two = load_some(second + at, left);
    Vector top = LARGEST ? load_some(largest + at, left) : two;
    Vector old = load_some(param + at, left), own = load_some(gradient + at, left);
    store_some(param + at, adam.update<DECAY, LARGEST>(old, own, one, two, top), left);
    store_some(first + at, one, left);
    store_some(second + at, two, left);
    if (LARGEST) store_some(largest + at, top, left);
  }
}

// param, both moments[, largest second moment] <- those after a step with the gradient, count, learning rate and skip.
// Settings: how many, both betas, epsilon, weight decay and its form, whether to maximize, whether a largest is there.
KERNEL(adam) {
  const Setting *s = settings;
  bool has_largest = s[7].whole;
  void *const *scalars = operands + 4 + has_largest;
  if (*(const float *)scalars[2] == 1) return;
  double count = *(const float *)scalars[0], rate = *(const double *)scalars[1];
  double beta1 = s[1].real, beta2 = s[2].real, decay = s[4].real;
  Adam adam = {(float)(1 - beta1),
               (float)beta2,
               (float)(1 - beta2),
               s[6].whole ? -1.0f : 1.0f,
               (float)decay,
               (float)(1 - rate * decay),
               (float)(rate / (1 - std::pow(beta1, count))),
               (float)(1 / std::sqrt(1 - std::pow(beta2, count))),
               (float)s[3].real};
  typedef void Update(const Adam &, void *const *, ptrdiff_t);
  static Update *const UPDATES[][2] = {
      {update_all<Decay::none, false>, update_all<Decay::none, true>},
      {update_all<Decay::added, false>, update_all<Decay::added, true>},
      {update_all<Decay::decoupled, false>, update_all<Decay::decoupled, true>},
  };
  UPDATES[s[5].whole][has_largest](adam, operands, s[0].whole);
}

// out <- 1 where x is infinite or NaN, else 0.
KERNEL(is_not_finite) {
  float x = *(const float *)operands[1];
  *(float *)operands[0] = x - x != 0;
}

// out <- count + 1 - skip.
KERNEL(count_step) { *(float *)operands[0] = *(const float *)operands[1] + 1 - *(const float *)operands[2]; }
