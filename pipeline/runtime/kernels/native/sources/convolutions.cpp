// Convolutions over images with channels last: kernels of one pixel as products, of 3 x 3 pixels by Winograd's tiles, and of
// any size over few channels as products with stretches of lines.

#include "products.h"

// Numbers of a tensor (images, lines, pixels, channels) whose channels lie side by side.
struct Images {
  float *data;
  ptrdiff_t image, line, pixel;

  float *at(ptrdiff_t n, ptrdiff_t y, ptrdiff_t x) const { return data + n * image + y * line + x * pixel; }
};

// out <- activation(pixels @ panels + bias + other).
// Settings: images, their stride, pixels of an image, columns, channels, stride of a pixel, pixels of a line, stride of a
// line, has a bias, has another, its row stride, the activation and its numbers.
KERNEL(convolve_points) {
  const Setting *s = settings;
  ptrdiff_t images = s[0].whole, pixels = s[2].whole, columns = s[3].whole, other_row = s[10].whole;
  void *const *rest = operands + 3;
  const float *bias = s[8].whole ? (const float *)*rest++ : nullptr;
  const float *other = s[9].whole ? (const float *)*rest : nullptr;
  for (ptrdiff_t n = 0; n < images; n++)
    multiply_all({pixels, columns, s[4].whole, (const float *)operands[1] + n * s[1].whole, s[5].whole, 1,
                  (const float *)operands[2], (float *)operands[0] + n * pixels * columns, columns, s[6].whole, s[7].whole},
                 {bias, other ? other + n * pixels * other_row : nullptr, other_row, (Activation)s[11].whole, s + 12, true});
}

// The image with a frame of zeros, without gaps; `channel` is the stride of its channels.
static void fill_frame(float *to, const Images &x, ptrdiff_t n, ptrdiff_t channel, const ptrdiff_t (&size)[3], const ptrdiff_t (&framed)[2],
                       ptrdiff_t top, ptrdiff_t left) {
  ptrdiff_t channels = size[2], line = framed[1] * channels;
  ptrdiff_t most = framed[1] - left, width = size[1] < most ? size[1] : most;
  memset(to, 0, 4 * framed[0] * line);
  for (ptrdiff_t y = 0; y < size[0] && y + top < framed[0]; y++) {
    float *place = to + (y + top) * line + left * channels;
    if (channel == 1 && x.pixel == channels)
      memcpy(place, x.at(n, y, 0), 4 * channels * (width > 0 ? width : 0));
    else
      for (ptrdiff_t c = 0; c < channels; c++) {
        const float *from = x.at(n, y, 0) + c * channel;
        for (ptrdiff_t z = 0; z < width; z++) place[z * channels + c] = from[z * x.pixel];
      }
  }
}

// out <- activation(convolution + bias + other), for few channels: a line of the kernel reads one stretch of the image.
// Settings: images, height, width, channels, columns, lines and pixels of the kernel, its strides, pads at the top and left,
// height and width of the result, strides of x by (image, line, pixel, channel), has a bias, has another, its row stride, the
// activation and its numbers.
KERNEL(convolve_lines) {
  const Setting *s = settings;
  ptrdiff_t size[] = {s[1].whole, s[2].whole, s[3].whole}, columns = s[4].whole, height = s[11].whole, width = s[12].whole;
  ptrdiff_t lines = s[5].whole, stretch = s[6].whole * size[2], down = s[7].whole, across = s[8].whole;
  ptrdiff_t framed[] = {(height - 1) * down + lines, (width - 1) * across + s[6].whole}, line = framed[1] * size[2];
  Images x = {(float *)operands[1], s[13].whole, s[14].whole, s[15].whole};
  void *const *rest = operands + 3;
  const float *bias = s[17].whole ? (const float *)*rest++ : nullptr;
  const float *other = s[18].whole ? (const float *)*rest : nullptr;
  After after = {bias, other, s[19].whole, (Activation)s[20].whole, s + 21, true};
  static thread_local std::vector<float> frame;
  frame.resize(framed[0] * line);
  ptrdiff_t depth = lines * stretch, tiles = (width + TILE - 1) / TILE;
  for (ptrdiff_t n = 0; n < s[0].whole; n++) {
    fill_frame(frame.data(), x, n, s[16].whole, size, framed, s[9].whole, s[10].whole);
    Product product = {s[0].whole * height * width, columns, depth, nullptr, 0, 1, nullptr, (float *)operands[0], columns};
    for (ptrdiff_t y = 0; y < height; y++)
      for (ptrdiff_t column = 0; column < columns; column += PANEL)
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
          ptrdiff_t from = tile * width / tiles, count = (tile + 1) * width / tiles - from;
          Factors of = {frame.data() + y * down * line + from * across * size[2], across * size[2], 1,
                        (const float *)operands[2] + column * depth, stretch};
          of.stretches = lines, of.stretch = line;
          ptrdiff_t left = columns - column < PANEL ? columns - column : PANEL;
          multiply_tile(product, after, {(n * height + y) * width + from, count, column, left, true, true}, of);
        }
  }
}

// Winograd's F(2 x 2, 3 x 3): tiles of 4 x 4 pixels, which overlap by two, become 16 numbers for each channel. For each of
// the 16 a product with a matrix follows, and these become 2 x 2 pixels: 16 multiplications take the place of 36.
constexpr int PLACES = 16;
constexpr ptrdiff_t NEAR_TILES = 1 << 18;  // numbers of the tiles that are near at a time, unless these are too few for the matrix

// The first two and the last two of four numbers, as sums of which the products are the convolution's.
static inline void split(Vector *a, Vector *b, Vector *c, Vector *d) {
  Vector first = *a - *c, second = *b + *c, third = *c - *b, fourth = *b - *d;
  *a = first, *b = second, *c = third, *d = fourth;
}

struct Tiles {
  ptrdiff_t height, width, channels, columns, top, left, out_height, out_width;

  ptrdiff_t across() const { return (out_width + 1) / 2; }
  ptrdiff_t down() const { return (out_height + 1) / 2; }
  ptrdiff_t row() const { return channels + BETWEEN; }

  // One tile becomes 16 rows, `apart` from each other. Beyond the image all is 0.
  void begin(const Images &x, ptrdiff_t tile, const float *zeros, float *to, ptrdiff_t apart) const {
    ptrdiff_t n = tile / (down() * across()), y = tile / across() % down() * 2 - top, z = tile % across() * 2 - left;
    const float *from[PLACES];
    for (int i = 0; i < PLACES; i++) {
      ptrdiff_t line = y + i / 4, pixel = z + i % 4;
      bool inside = line >= 0 && line < height && pixel >= 0 && pixel < width;
      from[i] = inside ? x.at(n, line, pixel) : zeros;
    }
    for (ptrdiff_t c = 0; c < channels; c += LANES) {
      Vector d[PLACES];
      ptrdiff_t count = channels - c;
#pragma GCC unroll 16
      for (int i = 0; i < PLACES; i++) d[i] = load_up_to(from[i] + c, count);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) split(d + i, d + 4 + i, d + 8 + i, d + 12 + i);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) split(d + 4 * i, d + 4 * i + 1, d + 4 * i + 2, d + 4 * i + 3);
#pragma GCC unroll 16
      for (int i = 0; i < PLACES; i++) store(to + i * apart + c, d[i]);
    }
  }

  // The products of one tile and panel, `apart` from each other, become 2 x 2 pixels.
  void end(const Pair *from, ptrdiff_t apart, ptrdiff_t tile, ptrdiff_t column, const Images &out, const Images &other,
           const After &after) const {
    ptrdiff_t n = tile / (down() * across()), y = tile / across() % down() * 2, z = tile % across() * 2;
    for (int half = 0; half < 2; half++) {
      ptrdiff_t place = column + half * LANES, count = columns - place;
      if (count <= 0) return;
      auto read = [=](const float *at) { return load_up_to(at, count); };
      Vector sums[2][4], bias = after.bias ? read(after.bias + place) : Vector{};
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        auto at = [&](int line) { return from[(4 * line + i) * apart][half]; };
        sums[0][i] = at(0) + at(1) + at(2);
        sums[1][i] = at(1) - at(2) - at(3);
      }
      for (int i = 0; i < 2 && y + i < out_height; i++)
        for (int j = 0; j < 2 && z + j < out_width; j++) {
          Vector *of = sums[i], x = bias + (j ? of[1] - of[2] - of[3] : of[0] + of[1] + of[2]);
          if (other.data) x += read(other.at(n, y + i, z + j) + place);
          x = activate(after.activation, x, after.numbers);
          float *to = out.at(n, y + i, z + j) + place;
          store_up_to(to, x, count);
        }
    }
  }
};

// out <- activation(convolution + bias + other).  Panels: (panel, 16 places, channels, columns of the panel).
// Settings: images, height, width, channels, columns, pads at the top and left, height and width of the result, strides of x,
// result and other by (image, line, pixel), has a bias, has another, the activation and its numbers.
KERNEL(convolve_tiles) {
  const Setting *s = settings, *strides = settings + 9;
  auto images = [&](void *data, int of) {
    return Images{(float *)data, strides[3 * of].whole, strides[3 * of + 1].whole, strides[3 * of + 2].whole};
  };
  Tiles t = {s[1].whole, s[2].whole, s[3].whole, s[4].whole, s[5].whole, s[6].whole, s[7].whole, s[8].whole};
  const float *panels = (const float *)operands[2];
  void *const *rest = operands + 3;
  const float *bias = s[18].whole ? (const float *)*rest++ : nullptr;
  Images x = images(operands[1], 0), out = images(operands[0], 1), other = images(s[19].whole ? *rest : nullptr, 2);
  After after = {bias, nullptr, 0, (Activation)s[20].whole, s + 21};

  ptrdiff_t tiles = s[0].whole * t.down() * t.across(), most = NEAR_TILES / (PLACES * t.row());
  if (most < 2 * TILE) most = 2 * TILE;
  ptrdiff_t blocks = (tiles + most - 1) / most, largest = (tiles + blocks - 1) / blocks, matrix = t.channels * PANEL;
  static thread_local std::vector<float> zeros, rows;
  static thread_local std::vector<Vector> sums;
  zeros.resize(t.channels);
  rows.resize(PLACES * largest * t.row());
  sums.resize(PLACES * largest * 2);
  for (ptrdiff_t block = 0; block < blocks; block++) {
    ptrdiff_t first = block * tiles / blocks, count = (block + 1) * tiles / blocks - first, steps = (count + TILE - 1) / TILE;
    for (ptrdiff_t i = 0; i < count; i++) t.begin(x, first + i, zeros.data(), rows.data() + i * t.row(), count * t.row());
    const float *panel = panels;
    for (ptrdiff_t column = 0; column < t.columns; column += PANEL) {
      for (int place = 0; place < PLACES; place++, panel += matrix)
        for (ptrdiff_t step = 0; step < steps; step++) {
          ptrdiff_t from = step * count / steps, to = (step + 1) * count / steps, ahead = PANEL / steps;
          const float *left = rows.data() + (place * count + from) * t.row();
          MULTIPLY[to - from]({left, t.row(), 1, panel, t.channels, panel + matrix + step * ahead * t.channels, ahead},
                              {(float *)((Pair *)sums.data() + place * count + from)});
        }
      for (ptrdiff_t i = 0; i < count; i++) t.end((Pair *)sums.data() + i, count, first + i, column, out, other, after);
    }
  }
}
