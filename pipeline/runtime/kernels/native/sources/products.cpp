// Kernels that are one product of matrices.

#include "products.h"

// panels <- matrix.  Settings: depth, columns, strides of the matrix.
KERNEL(pack_panels) {
  fill_panels((float *)operands[0], (const float *)operands[1], settings[0].whole, settings[1].whole, settings[2].whole,
              settings[3].whole);
}

// out <- activation(rows @ panels + bias) + other, which may be the memory of the result.
// Settings: rows, columns, depth, strides of the rows, row stride of the result, has a bias, has another, its row stride,
// the activation and its numbers.
KERNEL(multiply_packed) {
  const Setting *s = settings;
  void *const *rest = operands + 3;
  const float *bias = s[6].whole ? (const float *)*rest++ : nullptr;
  const float *other = s[7].whole ? (const float *)*rest : nullptr;
  multiply_all({s[0].whole, s[1].whole, s[2].whole, (const float *)operands[1], s[3].whole, s[4].whole,
                (const float *)operands[2], (float *)operands[0], s[5].whole},
               {bias, other, s[8].whole, (Activation)s[9].whole, s + 10});
}

// out <- activation(rows @ matrix + bias) + other, for a matrix with any strides.
// Settings: as of multiply_packed, with the strides of the matrix in front.
KERNEL(multiply_any) {
  const Setting *s = settings + 2;
  ptrdiff_t columns = s[1].whole, depth = s[2].whole;
  float *panels = panels_for(depth, columns);
  fill_panels(panels, (const float *)operands[2], depth, columns, settings[0].whole, settings[1].whole);
  void *packed[] = {operands[0], operands[1], panels, operands[3], operands[4]};
  multiply_packed(packed, s);
}

extern "C" const int panel_columns = PANEL;
