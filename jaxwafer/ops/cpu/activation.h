// How the two halves of a gated MLP are joined, as model/mlp.py's Activation describes.

#pragma once

#include <string_view>

#include "simd.h"

namespace {

enum class Join { kNone, kSilu, kSitu, kSwigluOai };

inline Floats Sigmoid(Floats x) { return 1.0f / (1.0f + Exp(-x)); }

// ln(1 + eˣ), of which the logarithm's argument is between 1 and 2. What the sum 1 + y rounds away of y is made up for.
inline Floats Softplus(Floats x) {
  Floats y = Exp(x < 0.0f ? x : -x), sum = 1.0f + y, kept = sum - 1.0f;
  Floats log = kept == 0.0f ? y : Log(sum) * (y / kept);
  return (x > 0.0f ? x : Floats{}) + log;
}

inline Floats Tanh(Floats x) { return 2.0f * Sigmoid(2.0f * x) - 1.0f; }

inline Floats Clip(Floats x, float low, float high) {
  Floats above = x < low ? Splat(low) : x;
  return above > high ? Splat(high) : above;
}

inline Floats Joined(Join join, const float* limits, Floats gate, Floats up) {
  switch (join) {
    case Join::kSitu:
      return limits[0] * Tanh(gate / limits[0]) * Sigmoid(gate) * limits[1] * Tanh(up / limits[1]);
    case Join::kSwigluOai:
      gate = gate > limits[0] ? Splat(limits[0]) : gate;
      return gate * Sigmoid(1.702f * gate) * (Clip(up, -limits[0], limits[0]) + 1.0f);
    default:
      return gate * Sigmoid(gate) * up;
  }
}

// gate ← gate and up joined.
inline void JoinInto(Join join, const float* limits, float* gate, const float* up, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    Store(gate + i, Joined(join, limits, Load<Floats>(gate + i), Load<Floats>(up + i)));
  float g[kLanes] = {}, u[kLanes] = {};
  std::memcpy(g, gate + i, (count - i) * 4), std::memcpy(u, up + i, (count - i) * 4);
  Store(g, Joined(join, limits, Load<Floats>(g), Load<Floats>(u)));
  std::memcpy(gate + i, g, (count - i) * 4);
}

}  // namespace
