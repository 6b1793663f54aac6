// Every number format over odd shapes, on buffers of exactly the size that is declared.

#include <cmath>
#include <cstdio>
#include <vector>

#include "pool.h"
#include "product.h"

struct Format {
  Values stored;
  ScaleType scale;
  int64_t group;
  float offset;
  bool zero, minimum;
};

static float Stored(const Matrix& w, int64_t n, int64_t k) {
  const uint8_t* row = w.values + n * w.row_bytes;
  uint16_t half[kLanes] = {};
  uint8_t byte[kLanes] = {};
  switch (w.stored) {
    case Values::kF32:
      return Load<float>(row + k * 4);
    case Values::kBf16:
      return Widen(Load<uint16_t>(row + k * 2));
    case Values::kF16:
      half[0] = Load<uint16_t>(row + k * 2);
      return FromHalf(Load<Halves>(half))[0];
    case Values::kFp8:
      byte[0] = row[k];
      return FromFp8(byte)[0] * kFp8Unit;
    case Values::kInt8:
      return float(int8_t(row[k]));
    case Values::kInt4:
      return float(row[k / 2] >> k % 2 * 4 & 15);
    default:
      return kE2m1Doubled[row[k / 2] >> k % 2 * 4 & 15] * 0.5f;
  }
}

static int Check(const Format& f, int64_t n, int64_t k, int64_t rows, bool quantise) {
  Pool pool;
  Matrix w{};
  bool nibbles = f.stored == Values::kInt4 || f.stored == Values::kE2m1;
  int64_t width = f.stored == Values::kF32 ? 4 : f.stored == Values::kBf16 || f.stored == Values::kF16 ? 2 : 1;
  w.stored = f.stored, w.scale_type = f.scale, w.offset = f.offset, w.outputs = n;
  w.inputs = f.group ? (k + f.group - 1) / f.group * f.group : k;
  w.row_bytes = nibbles ? w.inputs / 2 : w.inputs * width, w.blocks = (w.inputs + kBlock - 1) / kBlock;
  w.group_blocks = f.group / kBlock, w.groups = f.scale == ScaleType::kNone ? 0 : f.group ? w.inputs / f.group : 1;
  std::vector<uint8_t> values(n * w.row_bytes), scale(n * w.groups * BytesOf(f.scale)), other(scale.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = uint8_t(i * 2654435761u >> 24);
  if (width > 1)  // one and its neighbours, in any of the types
    for (size_t i = width - 1; i < values.size(); i += width) values[i] = f.stored == Values::kF16 ? 0x3c : 0x3f;
  if (f.stored == Values::kFp8)
    for (auto& v : values) v &= 0xbf;
  for (size_t i = 0; i < scale.size(); ++i) {
    int64_t bytes = BytesOf(f.scale);
    bool last = int64_t(i) % bytes == bytes - 1;
    scale[i] = f.scale == ScaleType::kE8m0 ? 126 + i % 3 : last ? 0x3c : uint8_t(i * 37);
    other[i] = f.zero ? i % 16 : scale[i];
  }
  w.values = values.data(), w.scale = w.groups ? scale.data() : nullptr;
  w.zero = f.zero ? other.data() : nullptr, w.minimum = f.minimum ? other.data() : nullptr;
  std::vector<float> x(rows * k), out(rows * n, NAN);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(int(i * 40503u >> 7 & 255) - 128) / 64;
  std::vector<float*> targets;
  for (int64_t m = 0; m < rows; ++m) targets.push_back(out.data() + m * n);
  Product product = ProductOf(w, rows, quantise);
  Source source{x.data(), false, rows, k, nullptr, 0};
  Arranged arranged(pool, source, w.blocks, product.order, product.quantise, product.sums);
  for (int64_t first = 0; first < n; first += product.step)
    product.chunk(w, arranged.view, targets.data(), first, std::min(first + product.step, n));
  int wrong = 0;
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t i = 0; i < n; ++i) {
      double want = 0, size = 0;
      for (int64_t c = 0; c < k; ++c) {
        int64_t at = i * w.groups + (f.group ? c / f.group : 0);
        double s = w.groups ? ScaleAt(f.scale, scale.data(), at) : 1, v = Stored(w, i, c);
        double value = f.zero ? (v - w.zero[at]) * s
                              : (v - f.offset) * s + (f.minimum ? ScaleAt(f.scale, other.data(), at) : 0);
        want += value * x[m * k + c], size += std::fabs(value * x[m * k + c]) + 16 * s * std::fabs(x[m * k + c]);
      }
      wrong += !(std::fabs(out[m * n + i] - want) <= (product.quantise ? 1e-2 : 1e-6) * size + 1e-20);
    }
  if (wrong) std::printf("%d of %d wrong: values %d, [%d, %d], %d rows, quantised %d\n", wrong, int(rows * n),
                         int(f.stored), int(n), int(k), int(rows), quantise);
  return wrong;
}

int main() {
  const Format formats[] = {
      {Values::kF32, ScaleType::kNone, 0, 0, false, false},   {Values::kBf16, ScaleType::kNone, 0, 0, false, false},
      {Values::kF16, ScaleType::kNone, 0, 0, false, false},   {Values::kFp8, ScaleType::kF32, 0, 0, false, false},
      {Values::kFp8, ScaleType::kF32, 128, 0, false, false},  {Values::kInt8, ScaleType::kF32, 0, 0, false, false},
      {Values::kInt8, ScaleType::kF16, 32, 0, false, false},  {Values::kInt4, ScaleType::kF16, 32, 8, false, false},
      {Values::kInt4, ScaleType::kF16, 32, 0, false, true},   {Values::kInt4, ScaleType::kBf16, 64, 8, false, false},
      {Values::kE2m1, ScaleType::kE8m0, 32, 0, false, false}, {Values::kInt4, ScaleType::kF32, 128, 0, true, false},
  };
  int wrong = 0;
  for (const Format& f : formats)
    for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {7, 45}, {19, 1100}, {70, 100}})
      for (int64_t rows : {1, 2, 5, 16, 19})
        for (bool quantise : {false, true}) wrong += Check(f, n, k, rows, quantise);
  return wrong != 0;
}
