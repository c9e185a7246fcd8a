// A rank's values for a collective of one dtype, and what the collective should make of everyone's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nccl_standin_values.h"
#include "share/comm.h"
#include "share/nccl_types.h"

namespace tradewind {

using Bytes = std::vector<std::byte>;

// Small integers, different for every rank: any sum of four is exact in every dtype.
inline int value_of(int rank, std::int64_t idx) {
  return static_cast<int>((idx * 7 + rank * 5) % 13);
}

struct NcclCase {
  DType dtype;
  std::int64_t num_elements;
  int size;

  [[nodiscard]] std::int64_t num_values() const {
    return num_elements * nccl_type_of(dtype).num_values;
  }
  [[nodiscard]] nccl::DataType type() const { return nccl_type_of(dtype).type; }
  [[nodiscard]] std::size_t bytes() const {
    return static_cast<std::size_t>(num_elements * element_bytes(dtype));
  }
  [[nodiscard]] std::byte* at(Bytes& bytes, std::int64_t idx) const {
    return bytes.data() + static_cast<std::size_t>(idx) * nccl_standin::bytes_of(type());
  }

  // `num_parts` parts of num_elements.
  [[nodiscard]] Bytes values(int rank, int num_parts = 1) const {
    Bytes made(bytes() * static_cast<std::size_t>(num_parts));
    for (std::int64_t idx = 0; idx < num_values() * num_parts; ++idx) {
      nccl_standin::store(type(), at(made, idx), value_of(rank, idx));
    }
    return made;
  }

  // Of all ranks' values; `first` is the first value's index.
  [[nodiscard]] Bytes reduced(Reduction reduction, std::int64_t first = 0) const {
    Bytes made(bytes());
    for (std::int64_t idx = 0; idx < num_values(); ++idx) {
      int sum = 0;
      int largest = 0;
      for (int rank = 0; rank < size; ++rank) {
        const int value = value_of(rank, first + idx);
        sum += value;
        largest = value > largest ? value : largest;
      }
      const long double mean = static_cast<long double>(sum) / size;
      nccl_standin::store(type(), at(made, idx),
                          reduction == Reduction::kMax    ? largest
                          : reduction == Reduction::kMean ? mean
                                                          : sum);
    }
    return made;
  }

  // The largest |a - b| over max(1, |b|).
  [[nodiscard]] double distance(Bytes& a, Bytes& b) const {
    long double largest = 0;
    for (std::int64_t idx = 0; idx < num_values(); ++idx) {
      const long double expected = nccl_standin::load(type(), at(b, idx));
      const long double off = nccl_standin::load(type(), at(a, idx)) - expected;
      const long double relative = (off < 0 ? -off : off) / (expected > 1 ? expected : 1);
      largest = relative > largest ? relative : largest;
    }
    return static_cast<double>(largest);
  }
};

}  // namespace tradewind
