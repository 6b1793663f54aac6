// Lengths around a block, in pages of exactly the size that is declared; a row past the live ones is not a number.

#include "../../../jaxwafer/ops/attention/cpu.cc"

#include <cstdio>

#include "pool.h"

static int Check(int64_t width, bool shared, int64_t tokens, int64_t window, int64_t dim, bool sunk) {
  constexpr int64_t kBatch = 6, kBlock = 8, kColumns = 80, kHeads = 2, kGroup = 5;
  int64_t heads = shared ? 1 : kHeads, rank = shared ? dim - 3 : dim, blocks = kBatch * kColumns;
  std::vector<int32_t> start{0, 6, 7, 8, 0, 520}, count{int32_t(tokens), 1, 1, 1, 0, int32_t(tokens)}, table(blocks);
  for (int64_t i = 0; i < blocks; ++i) table[i] = int32_t(blocks - 1 - i);
  std::vector<uint8_t> keys(blocks * kBlock * heads * dim * width, 0xff);
  std::vector<int8_t> exponent(blocks * kBlock * heads, 1);
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t t = 0; t < start[b] + count[b]; ++t)
      for (int64_t i = 0; i < heads * dim; ++i) {
        int64_t at = (table[b * kColumns + t / kBlock] * kBlock + t % kBlock) * heads * dim + i;
        float value = float((t + i) % 3);
        uint32_t bits = Load<uint32_t>(&value);
        if (width == 4) std::memcpy(&keys[at * 4], &bits, 4);
        if (width == 2) std::memcpy(&keys[at * 2], reinterpret_cast<char*>(&bits) + 2, 2);
        if (width == 1) keys[at] = uint8_t((t + i) % 3 * 0x38 / 2);
      }
  std::vector<float> q(kBatch * tokens * heads * kGroup * dim, 0.1f), out(kBatch * tokens * heads * kGroup * rank, NAN);
  std::vector<float> highest(kBatch * tokens * heads * kGroup), total(highest.size()), sinks(heads * kGroup, 0.5f);
  Field field{keys.data(), width == 1 ? exponent.data() : nullptr, blocks, kBlock, heads, dim, width};
  Problem p{q.data(), false, kBatch, tokens, heads, kGroup, dim, rank, kColumns, window, start.data(), count.data(),
            table.data(), 0, field, field, shared, 0.3f, sunk ? sinks.data() : nullptr, out.data(),
            shared ? highest.data() : nullptr, shared ? total.data() : nullptr};
  Pool pool;
  Run(pool, p);
  int wrong = 0;
  for (float value : out) wrong += !std::isfinite(value);
  if (wrong) std::printf("%d not finite: width %d, shared %d, %d tokens\n", wrong, int(width), shared, int(tokens));
  return wrong;
}

int main() {
  int wrong = 0;
  for (int64_t width : {1, 2, 4})
    for (bool shared : {false, true})
      for (int64_t tokens : {1, 5})
        for (int64_t dim : {16, 19})
          for (int64_t window : {0, 3}) wrong += Check(width, shared, tokens, shared ? 0 : window, dim, window == 3);
  return wrong != 0;
}
