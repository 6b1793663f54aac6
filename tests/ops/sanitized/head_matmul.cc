// Each head's product with its own rows, over odd shapes and orders of inputs, on buffers of exactly the declared size.

#include "../../../jaxwafer/ops/head_matmul/cpu.cc"

#include <cmath>
#include <cstdio>

#include "pool.h"

// int4 with an offset of 8 and a float32 scale for 32 inputs, int8 with one for an output, or bfloat16.
static int Check(Values stored, int64_t tokens, int64_t heads, int64_t rows, int64_t k) {
  Pool pool;
  Matrix w{};
  bool nibbles = stored == Values::kInt4, whole = stored == Values::kInt8;
  w.stored = stored, w.outputs = heads * rows, w.inputs = nibbles ? (k + 31) / 32 * 32 : k;
  w.row_bytes = nibbles ? w.inputs / 2 : whole ? k : 2 * k, w.blocks = (w.inputs + kBlock - 1) / kBlock;
  w.group_blocks = nibbles, w.groups = nibbles ? w.blocks : whole, w.offset = nibbles ? 8 : 0;
  w.scale_type = nibbles || whole ? ScaleType::kF32 : ScaleType::kNone;
  std::vector<uint8_t> values(w.outputs * w.row_bytes);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = stored == Values::kBf16 && i % 2 ? 0x3f : uint8_t(i * 2654435761u >> 24);
  std::vector<float> scale(w.outputs * w.groups), x(tokens * heads * rows), out(tokens * heads * k, NAN);
  for (size_t i = 0; i < scale.size(); ++i) scale[i] = 0.5f + float(i % 5);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(int(i * 40503u >> 7 & 255) - 128) / 64;
  w.values = values.data();
  w.scale = w.groups ? reinterpret_cast<const uint8_t*>(scale.data()) : nullptr;
  AbsorbInto(pool, w, x.data(), false, tokens, heads, rows, k, out.data());
  int wrong = 0;
  for (int64_t m = 0; m < tokens; ++m)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t c = 0; c < k; ++c) {
        double want = 0, size = 0;
        for (int64_t n = 0; n < rows; ++n) {
          const uint8_t* row = w.values + (h * rows + n) * w.row_bytes;
          double v = nibbles ? (row[c / 2] >> c % 2 * 4 & 15) - 8
                             : whole ? int8_t(row[c]) : Widen(Load<uint16_t>(row + 2 * c));
          if (w.groups) v *= scale[(h * rows + n) * w.groups + (nibbles ? c / 32 : 0)];
          double term = v * x[(m * heads + h) * rows + n];
          want += term, size += std::fabs(term) + 1;
        }
        wrong += !(std::fabs(out[(m * heads + h) * k + c] - want) <= 1e-5 * size);
      }
  if (wrong) std::printf("%d wrong: values %d, %d tokens, [%d, %d, %d]\n", wrong, int(stored), int(tokens), int(heads),
                         int(rows), int(k));
  return wrong;
}

int main() {
  int wrong = 0;
  for (Values stored : {Values::kInt4, Values::kInt8, Values::kBf16})
    for (auto [heads, rows, k] : {std::array<int64_t, 3>{1, 1, 1}, {3, 5, 45}, {2, 33, 1100}})
      for (int64_t tokens : {1, 4, 5, 9}) wrong += Check(stored, tokens, heads, rows, k);
  return wrong != 0;
}
