// CRC-32C (Castagnoli; RFC 3720, section 12.1 and appendix B.4), by the processor's instruction
// where it has one. The same sum as S3, GCS, iSCSI and the crc32c packages: initial value and final
// XOR are inside, so 0 is the sum of nothing and sums go on where they ended. Pure functions, from
// any thread.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace tradewind {

// The sum of what `crc` stands for followed by these bytes; 0 to begin.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::int64_t size_bytes) noexcept;

// The sum of two runs of bytes one after the other, from their own sums. O(log second_bytes).
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second,
                             std::int64_t second_bytes) noexcept;

struct Crc32cPath {
  std::string_view name;
  std::uint32_t (*extend)(std::uint32_t crc, const void* data, std::int64_t size_bytes) noexcept;
};
// Every way that this build and this processor have, slowest first; crc32c() takes the last.
const std::vector<Crc32cPath>& crc32c_paths();

}  // namespace tradewind
