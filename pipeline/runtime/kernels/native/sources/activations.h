// Activations of vectors, by the numbers that `activations.py` gives them.
#pragma once

#include "vectors.h"

enum class Activation : int64_t { none, relu, gelu, gelu_tanh, silu, sigmoid, tanh, hardswish, clip, leaky_relu };

// x times a polynomial of x squared, scaled to [-1, 1]: fitted so that the largest error over [-3.92, 3.92] is least,
// 3e-7 with its roundings. Beyond that the function is 1 to the last digit of a float.
static inline Vector erf(Vector x) {
  const float FROM = 3.92f;
  const float FACTORS[] = {
      3.607368322e-01f,  -1.801090903e-01f, 1.340821929e-01f,  -1.091603684e-01f, 9.063982811e-02f,
      -7.424104299e-02f, 5.810825919e-02f,  -4.229877335e-02f, 3.060761872e-02f,  -2.298586633e-02f,
      1.274560054e-02f,  -3.469700735e-03f, 3.079585163e-03f,  -4.373332949e-03f, 1.740315171e-03f,
  };
  Vector scaled = x * x * (2 / (FROM * FROM)) - 1.0f, found = spread(FACTORS[14]);
#pragma GCC unroll 14
  for (int i = 13; i >= 0; i--) found = found * scaled + FACTORS[i];
  found = x >= FROM ? spread(1.0f) : x * found;
  return x <= -FROM ? spread(-1.0f) : found;
}

// A polynomial near 0, where the other form would round most of x away; its relative error is 1e-7.
static inline Vector tanh(Vector x) {
  const float FACTORS[] = {9.999999974e-01f,  -3.333328211e-01f, 1.333166370e-01f,
                           -5.376675855e-02f, 2.074749441e-02f,  -5.845390049e-03f};
  Vector square = x * x, near = spread(FACTORS[5]), size = x < 0.0f ? -x : x;
  for (int i = 4; i >= 0; i--) near = near * square + FACTORS[i];
  Vector far = 1.0f - 2.0f / (exp(2.0f * size) + 1.0f);
  return size < 0.6f ? x * near : (x < 0.0f ? -far : far);
}

static inline Vector sigmoid(Vector x) { return 1.0f / (1.0f + exp(-x)); }

static inline Vector activate(Activation activation, Vector x, const Setting *numbers) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::relu:
      return x < 0.0f ? Vector{} : x;
    case Activation::gelu:
      return 0.5f * x * (1.0f + erf(x * 0.707106781186547524f));
    case Activation::gelu_tanh:
      return 0.5f * x * (1.0f + tanh(0.797884560802865356f * (x + 0.044715f * x * x * x)));
    case Activation::silu:
      return x * sigmoid(x);
    case Activation::sigmoid:
      return sigmoid(x);
    case Activation::tanh:
      return tanh(x);
    case Activation::hardswish: {
      Vector gate = x + 3.0f;
      gate = gate < 0.0f ? Vector{} : gate;
      gate = gate > 6.0f ? spread(6.0f) : gate;
      return x * gate / 6.0f;
    }
    case Activation::clip: {
      Vector least = spread((float)numbers[0].real), most = spread((float)numbers[1].real);
      x = x < least ? least : x;
      return x > most ? most : x;
    }
    case Activation::leaky_relu:
      return x < 0.0f ? x * (float)numbers[0].real : x;
  }
  return x;
}
