// Stacks of weights as arguments of an XLA FFI handler: the arrays of each weight in order (values, then those of scale,
// zero and minimum that it has), described by four numbers as ops/native_weights.py gives them.

#pragma once

#include <string>
#include <vector>

#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// A stack of matrices; `count` of them.
struct Stack {
  Matrix first;
  int64_t count;

  Matrix at(int64_t i) const {
    Matrix m = first;
    m.values += i * m.outputs * m.row_bytes;
    int64_t scales = i * m.outputs * m.groups;
    if (m.scale) m.scale += scales * BytesOf(m.scale_type);
    if (m.zero) m.zero += scales;
    if (m.minimum) m.minimum += scales * BytesOf(m.scale_type);
    return m;
  }
};

inline ScaleType ScaleTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return ScaleType::kF32;
    case ffi::DataType::BF16:
      return ScaleType::kBf16;
    case ffi::DataType::F16:
      return ScaleType::kF16;
    case ffi::DataType::F8E8M0FNU:
      return ScaleType::kE8m0;
    default:
      return ScaleType::kNone;
  }
}

// Reads the weights that follow argument `at`. axes: of the arrays, the stack's among them.
inline ffi::ErrorOr<std::vector<Stack>> ReadStacks(ffi::RemainingArgs args, size_t at, ffi::Span<const int64_t> layout,
                                                   size_t axes) {
  constexpr int64_t kScale = 1, kZero = 2, kMinimum = 4;
  std::vector<Stack> stacks;
  auto next = [&]() { return args.get<ffi::AnyBuffer>(at++); };
  for (size_t i = 0; i + 4 <= layout.size(); i += 4) {
    int64_t stored = layout[i], group = layout[i + 1], offset = layout[i + 2], parts = layout[i + 3];
    auto values = next();
    if (!values) return ffi::Unexpected(values.error());
    auto shape = values->dimensions();
    if (shape.size() != axes) return ffi::Unexpected(ffi::Error::InvalidArgument("weights of a wrong number of axes"));
    Stack stack{};
    stack.count = 1;
    for (size_t axis = 0; axis + 2 < axes; ++axis) stack.count *= shape[axis];
    Matrix& m = stack.first;
    m.stored = Values(stored), m.offset = float(offset), m.outputs = shape[axes - 2];
    m.values = static_cast<const uint8_t*>(values->untyped_data());
    m.row_bytes = shape[axes - 1] * int64_t(ffi::ByteWidth(values->element_type()));
    m.inputs = shape[axes - 1] * (m.stored == Values::kInt4 || m.stored == Values::kE2m1 ? 2 : 1);
    m.blocks = (m.inputs + kBlock - 1) / kBlock, m.group_blocks = group / kBlock;
    if (group % kBlock || (group && m.inputs % group))
      return ffi::Unexpected(ffi::Error::InvalidArgument("groups must be of whole blocks of 32 inputs"));
    if (parts & kScale) {
      auto scale = next();
      if (!scale) return ffi::Unexpected(scale.error());
      m.scale = static_cast<const uint8_t*>(scale->untyped_data());
      m.scale_type = ScaleTypeOf(scale->element_type()), m.groups = scale->dimensions().back();
    }
    for (int64_t part : {kZero, kMinimum}) {
      if (!(parts & part)) continue;
      auto shift = next();
      if (!shift) return ffi::Unexpected(shift.error());
      (part == kZero ? m.zero : m.minimum) = static_cast<const uint8_t*>(shift->untyped_data());
    }
    stacks.push_back(stack);
  }
  return stacks;
}

}  // namespace
