#include "share/codec.h"

#include <string>

#include "base/error.h"
#include "share/codes.h"

namespace tradewind {
namespace {

constexpr std::string_view kNames[kNumCodecs] = {"none", "bf16", "fp16", "int8"};

}  // namespace

Codec codec_named(std::string_view name) {
  std::string known;
  for (int i = 0; i < kNumCodecs; ++i) {
    if (kNames[i] == name) return static_cast<Codec>(i);
    known += (known.empty() ? "" : ", ") + std::string(kNames[i]);
  }
  fail(ErrorKind::kBadValue, "codec: expected one of ", known, ", got '", name, "'");
}

std::string_view name_of(Codec codec) { return kNames[static_cast<int>(codec)]; }

bool takes(Codec codec, DType dtype) {
  return codec == Codec::kNone ? is_floating(dtype)
                               : is_floating(dtype) && dtype != DType::kFloat64;
}

std::int64_t wire_bytes(Codec codec, DType dtype, std::int64_t num_elements) {
  if (codec == Codec::kNone) return num_elements * element_bytes(dtype);
  const std::int64_t whole = num_elements / kCodecBlockElements;
  const std::int64_t rest = num_elements % kCodecBlockElements;
  return whole * wire_block_bytes(codec, kCodecBlockElements) +
         (rest == 0 ? 0 : wire_block_bytes(codec, rest));
}

}  // namespace tradewind
