#include "base/crc32c.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define TRADEWIND_CRC32C_TARGET __attribute__((target("sse4.2")))
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define TRADEWIND_CRC32C_TARGET
#endif

namespace tradewind {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

// Polynomials over GF(2) modulo Castagnoli's, reflected: the highest bit is the coefficient of x^0.
constexpr std::uint32_t kPolynomial = 0x82F63B78U;
constexpr std::uint32_t kOne = 0x80000000U;

constexpr std::uint32_t times_x(std::uint32_t value) {
  return (value >> 1U) ^ ((value & 1U) != 0 ? kPolynomial : 0U);
}

constexpr std::uint32_t multiply(std::uint32_t left, std::uint32_t right) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1U) {
    if ((left & bit) != 0) product ^= right;
    right = times_x(right);
  }
  return product;
}

// x^(2^k): squares of x. The last ones are for sizes near 2^63 bytes.
constexpr auto kSquares = [] {
  std::array<std::uint32_t, 66> squares{};
  squares[0] = times_x(kOne);
  for (std::size_t k = 1; k < squares.size(); ++k) {
    squares[k] = multiply(squares[k - 1], squares[k - 1]);
  }
  return squares;
}();

// x^(8 n): what n bytes of zeros multiply a sum by.
constexpr std::uint32_t shift_of(std::uint64_t num_bytes) {
  std::uint32_t power = kOne;
  for (std::size_t k = 3; num_bytes != 0; ++k, num_bytes >>= 1U) {
    if ((num_bytes & 1U) != 0) power = multiply(power, kSquares[k]);
  }
  return power;
}

// Slicing by eight (Kounavis and Berry, 2005): kTables[k][b] is the sum of byte b and k zero bytes.
constexpr auto kTables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = times_x(sum);
    tables[0][byte] = sum;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8U) ^ tables[0][before & 0xFFU];
    }
  }
  return tables;
}();

std::uint64_t word_at(const unsigned char* bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

std::uint32_t extend_by_table(std::uint32_t crc, const void* data,
                              std::int64_t size_bytes) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint32_t sum = ~crc;
  for (; size_bytes >= 8; size_bytes -= 8, bytes += 8) {
    const std::uint64_t word = word_at(bytes) ^ sum;
    sum = 0;
    for (std::size_t k = 0; k < 8; ++k) sum ^= kTables[7 - k][(word >> (8 * k)) & 0xFFU];
  }
  for (; size_bytes > 0; --size_bytes, ++bytes) {
    sum = (sum >> 8U) ^ kTables[0][(sum ^ *bytes) & 0xFFU];
  }
  return ~sum;
}

#ifdef TRADEWIND_CRC32C_TARGET

#if defined(__x86_64__)
TRADEWIND_CRC32C_TARGET inline std::uint64_t add_word(std::uint64_t sum, std::uint64_t word) {
  return _mm_crc32_u64(sum, word);
}
TRADEWIND_CRC32C_TARGET inline std::uint32_t add_byte(std::uint32_t sum, unsigned char byte) {
  return _mm_crc32_u8(sum, byte);
}
#else
inline std::uint64_t add_word(std::uint64_t sum, std::uint64_t word) {
  return __crc32cd(static_cast<std::uint32_t>(sum), word);
}
inline std::uint32_t add_byte(std::uint32_t sum, unsigned char byte) {
  return __crc32cb(sum, byte);
}
#endif

// The instruction takes three cycles and one can begin in each: three runs of bytes are summed side
// by side, and joined by multiplying with x^(8 kBytes), a table look-up for each byte of a sum.
template <std::int64_t kBytes>
struct Lanes {
  static constexpr auto kShift = [] {
    std::array<std::array<std::uint32_t, 256>, 4> tables{};
    const std::uint32_t shift = shift_of(kBytes);
    for (std::size_t k = 0; k < 4; ++k) {
      for (std::uint32_t byte = 0; byte < 256; ++byte) {
        tables[k][byte] = multiply(shift, byte << (8 * k));
      }
    }
    return tables;
  }();

  static std::uint32_t shifted(std::uint64_t sum) {
    return kShift[0][sum & 0xFFU] ^ kShift[1][(sum >> 8U) & 0xFFU] ^
           kShift[2][(sum >> 16U) & 0xFFU] ^ kShift[3][(sum >> 24U) & 0xFFU];
  }

  // As many whole triples as there are; moves on `bytes` and `size_bytes`.
  TRADEWIND_CRC32C_TARGET static std::uint32_t extend(std::uint32_t sum,
                                                      const unsigned char*& bytes,
                                                      std::int64_t& size_bytes) {
    for (; size_bytes >= 3 * kBytes; size_bytes -= 3 * kBytes, bytes += 3 * kBytes) {
      std::uint64_t first = sum, second = 0, third = 0;
      for (std::int64_t i = 0; i < kBytes; i += 8) {
        first = add_word(first, word_at(bytes + i));
        second = add_word(second, word_at(bytes + kBytes + i));
        third = add_word(third, word_at(bytes + 2 * kBytes + i));
      }
      const std::uint32_t two = shifted(first) ^ static_cast<std::uint32_t>(second);
      sum = shifted(two) ^ static_cast<std::uint32_t>(third);
    }
    return sum;
  }
};

TRADEWIND_CRC32C_TARGET std::uint32_t extend_by_instruction(std::uint32_t crc, const void* data,
                                                            std::int64_t size_bytes) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint32_t sum = ~crc;
  sum = Lanes<4096>::extend(sum, bytes, size_bytes);
  sum = Lanes<128>::extend(sum, bytes, size_bytes);
  for (; size_bytes >= 8; size_bytes -= 8, bytes += 8) {
    sum = static_cast<std::uint32_t>(add_word(sum, word_at(bytes)));
  }
  for (; size_bytes > 0; --size_bytes, ++bytes) sum = add_byte(sum, *bytes);
  return ~sum;
}

bool has_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2") != 0;
#else
  return true;
#endif
}

#endif  // TRADEWIND_CRC32C_TARGET

}  // namespace

const std::vector<Crc32cPath>& crc32c_paths() {
  static const auto* paths = [] {
    auto* all = new std::vector<Crc32cPath>{{"table", &extend_by_table}};
#ifdef TRADEWIND_CRC32C_TARGET
    if (has_instruction()) all->push_back({"instruction", &extend_by_instruction});
#endif
    return all;
  }();
  return *paths;
}

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::int64_t size_bytes) noexcept {
  static const auto kExtend = crc32c_paths().back().extend;
  return kExtend(crc, data, size_bytes);
}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second,
                             std::int64_t second_bytes) noexcept {
  return multiply(shift_of(static_cast<std::uint64_t>(second_bytes)), first) ^ second;
}

}  // namespace tradewind
