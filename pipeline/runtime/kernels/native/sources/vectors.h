// Vectors of floats as wide as the registers of this machine, and functions of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));

// What Python packs for a kernel: eight bytes for each number.
union Setting {
  int64_t whole;
  double real;
};

// Every kernel gets the addresses of its operands, results first, and its settings.
#define KERNEL(name) extern "C" void name(void *const *operands, const Setting *settings)

static inline Vector load(const float *from) {
  Vector found;
  memcpy(&found, from, sizeof found);
  return found;
}

static inline void store(float *to, Vector x) { memcpy(to, &x, sizeof x); }

#if defined(__AVX__) && !defined(__AVX512F__)
static inline __m256i first_lanes(ptrdiff_t count) {
  static const int32_t LANES_AND_NONE[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256((const __m256i *)(LANES_AND_NONE + LANES - count));
}
#endif

// The first `count` numbers; the other lanes are 0.
static inline Vector load_some(const float *from, ptrdiff_t count) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps((__mmask16)((1 << count) - 1), from);
#elif defined(__AVX__)
  return _mm256_maskload_ps(from, first_lanes(count));
#else
  Vector found = {};
  memcpy(&found, from, 4 * count);
  return found;
#endif
}

static inline void store_some(float *to, Vector x, ptrdiff_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, (__mmask16)((1 << count) - 1), x);
#elif defined(__AVX__)
  _mm256_maskstore_ps(to, first_lanes(count), x);
#else
  memcpy(to, &x, 4 * count);
#endif
}

// Up to a whole vector: the first `count` numbers.
static inline Vector load_up_to(const float *from, ptrdiff_t count) {
  return count < LANES ? load_some(from, count) : load(from);
}

static inline void store_up_to(float *to, Vector x, ptrdiff_t count) {
  if (count < LANES)
    store_some(to, x, count);
  else
    store(to, x);
}

static inline Vector spread(float x) { return x - Vector{}; }

static inline Vector larger(Vector x, Vector y) { return x < y || y != y ? y : x; }  // NaN where one is

// The lanes of x, each moved by STEP places.
template <int STEP, size_t... LANE>
static inline Vector turn(Vector x, std::index_sequence<LANE...>) {
  return __builtin_shufflevector(x, x, (LANE + STEP) % LANES...);
}

typedef std::make_index_sequence<LANES> Lanes;

// One number of all lanes, which are halved again and again.
template <int WIDTH = LANES / 2, typename Join>
static inline float join_lanes(Vector x, Join join) {
  x = join(x, turn<WIDTH>(x, Lanes()));
  if constexpr (WIDTH == 1)
    return x[0];
  else
    return join_lanes<WIDTH / 2>(x, join);
}

static inline float sum_of(Vector x) {
  return join_lanes(x, [](Vector one, Vector other) { return one + other; });
}

static inline float largest_of(Vector x) { return join_lanes(x, larger); }

// Two rows of a square trade the lanes of which the places differ by WIDTH.
template <int WIDTH, size_t... LANE>
static inline void trade(Vector &one, Vector &other, std::index_sequence<LANE...>) {
  Vector first = __builtin_shufflevector(one, other, (LANE & WIDTH ? LANES + LANE - WIDTH : LANE)...);
  other = __builtin_shufflevector(one, other, (LANE & WIDTH ? LANES + LANE : LANE + WIDTH)...);
  one = first;
}

template <int WIDTH = LANES / 2>
static inline void turn_square(Vector *rows) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++)
    if (!(i & WIDTH)) trade<WIDTH>(rows[i], rows[i + WIDTH], Lanes());
  if constexpr (WIDTH > 1) turn_square<WIDTH / 2>(rows);
}

// e to the x: 2 to a whole number, times a polynomial of what is left of x, within [-ln 2 / 2, ln 2 / 2].
static inline Vector exp(Vector x) {
  const float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  Vector held = x > 89.0f ? spread(89.0f) : x;
  held = held < -88.0f ? spread(-88.0f) : held;
  Vector turns = held * 1.44269504088896341f + ROUND;
  Whole exponent = ((Whole)turns - (Whole)spread(ROUND) + 127) << 23;
  turns -= ROUND;
  Vector rest = held - turns * 0.693359375f + turns * 2.12194440e-4f;  // ln 2 in two parts
  Vector found = spread(1.0f / 5040);
  found = found * rest + 1.0f / 720;
  found = found * rest + 1.0f / 120;
  found = found * rest + 1.0f / 24;
  found = found * rest + 1.0f / 6;
  found = found * rest + 0.5f;
  found = found * rest + 1.0f;
  found = found * rest + 1.0f;
  found *= (Vector)exponent;
  return x < -87.3365f ? Vector{} : found;
}
