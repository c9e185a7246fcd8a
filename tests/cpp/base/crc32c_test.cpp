#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/fenced_array.h"
#include "base/split_mix.h"

namespace tradewind {
namespace {

using Bytes = std::vector<unsigned char>;

// Bit by bit, as RFC 3720 defines it.
std::uint32_t reference(std::uint32_t crc, const unsigned char* bytes, std::int64_t size_bytes) {
  std::uint32_t sum = crc ^ 0xFFFFFFFFU;
  for (std::int64_t i = 0; i < size_bytes; ++i) {
    sum ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) sum = (sum & 1U) != 0 ? (sum >> 1U) ^ 0x82F63B78U : sum >> 1U;
  }
  return sum ^ 0xFFFFFFFFU;
}

Bytes random_bytes(std::int64_t size_bytes) {
  SplitMix values(static_cast<std::uint64_t>(size_bytes));
  Bytes bytes(static_cast<std::size_t>(size_bytes));
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(values.next());
  return bytes;
}

std::int64_t size_of(const Bytes& bytes) { return static_cast<std::int64_t>(bytes.size()); }

struct Crc32c : testing::TestWithParam<Crc32cPath> {
  static std::uint32_t sum(const Bytes& bytes) {
    return GetParam().extend(0, bytes.data(), size_of(bytes));
  }
};

INSTANTIATE_TEST_SUITE_P(Paths, Crc32c, testing::ValuesIn(crc32c_paths()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Crc32c, GivesTheVectorsOfRfc3720) {
  EXPECT_EQ(sum(Bytes(32, 0x00)), 0x8A9136AAU);
  EXPECT_EQ(sum(Bytes(32, 0xFF)), 0x62A8AB43U);
  Bytes rising(32);
  std::iota(rising.begin(), rising.end(), static_cast<unsigned char>(0));
  EXPECT_EQ(sum(rising), 0x46DD794EU);
  EXPECT_EQ(sum(Bytes(rising.rbegin(), rising.rend())), 0x113FDB5CU);
  Bytes read_command(48, 0x00);  // an iSCSI SCSI Read (10) PDU
  for (const auto& [at, byte] : {std::pair{0, 0x01},
                                 {1, 0xC0},
                                 {16, 0x14},
                                 {22, 0x04},
                                 {27, 0x14},
                                 {31, 0x18},
                                 {32, 0x28},
                                 {40, 0x02}}) {
    read_command[static_cast<std::size_t>(at)] = static_cast<unsigned char>(byte);
  }
  EXPECT_EQ(sum(read_command), 0xD9963A56U);
  const std::string digits = "123456789";  // the check value of the catalogue of CRCs
  EXPECT_EQ(sum(Bytes(digits.begin(), digits.end())), 0xE3069283U);
  EXPECT_EQ(sum({}), 0U);
}

// Every length up to several short triples of lanes, and those around long ones, each so placed
// that the byte behind it cannot be read.
TEST_P(Crc32c, GivesTheReferenceForEveryLength) {
  std::set<std::int64_t> sizes;
  for (std::int64_t size = 0; size <= 900; ++size) sizes.insert(size);
  for (const std::int64_t lanes : {3 * 128, 3 * 4096, 6 * 4096, 3 * 4096 + 3 * 128}) {
    for (std::int64_t near = -17; near <= 17; ++near) sizes.insert(lanes + near);
  }
  sizes.insert(1 << 20);
  for (const std::int64_t size : sizes) {
    FencedArray<unsigned char> bytes(random_bytes(size));
    ASSERT_EQ(GetParam().extend(0, bytes.data(), size), reference(0, bytes.data(), size)) << size;
  }
}

TEST_P(Crc32c, GivesTheReferenceAtEveryAlignmentAndFromEverySum) {
  const Bytes bytes = random_bytes(3 * 4096 + 3 * 128 + 64);
  SplitMix values(7);
  for (std::int64_t begin = 0; begin < 64; ++begin) {
    const auto before = static_cast<std::uint32_t>(values.next());
    const std::int64_t size = size_of(bytes) - begin;
    ASSERT_EQ(GetParam().extend(before, bytes.data() + begin, size),
              reference(before, bytes.data() + begin, size))
        << begin;
  }
}

TEST_P(Crc32c, GoesOnWhereItEnded) {
  const Bytes bytes = random_bytes(20000);
  const std::uint32_t whole = sum(bytes);
  for (const std::int64_t cut : {0, 1, 7, 8, 383, 384, 12287, 12288, 19999, 20000}) {
    const std::uint32_t first = GetParam().extend(0, bytes.data(), cut);
    EXPECT_EQ(GetParam().extend(first, bytes.data() + cut, size_of(bytes) - cut), whole) << cut;
  }
}

TEST(Crc32cChoice, TheFastestPathIsTaken) {
  ASSERT_EQ(crc32c_paths().front().name, "table");
#if defined(__x86_64__)
  const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  EXPECT_EQ(crc32c_paths().back().name, has_instruction ? "instruction" : "table");
#endif
  const Bytes bytes = random_bytes(5000);
  EXPECT_EQ(crc32c(3, bytes.data(), 5000), reference(3, bytes.data(), 5000));
}

TEST(Crc32cCombine, GivesTheSumOfBothRuns) {
  const Bytes bytes = random_bytes(70000);
  const std::uint32_t whole = reference(0, bytes.data(), 70000);
  for (const std::int64_t cut : {0, 1, 2, 3, 255, 4096, 32768, 65535, 65536, 69999, 70000}) {
    const std::uint32_t first = reference(0, bytes.data(), cut);
    const std::uint32_t second = reference(0, bytes.data() + cut, 70000 - cut);
    EXPECT_EQ(crc32c_combine(first, second, 70000 - cut), whole) << cut;
  }
}

// What a run of zeros does to a sum, as a matrix over GF(2): a column for each bit of the sum.
using Matrix = std::array<std::uint32_t, 32>;

std::uint32_t applied(const Matrix& matrix, std::uint32_t sum) {
  std::uint32_t result = 0;
  for (std::size_t bit = 0; bit < 32; ++bit) result ^= (sum >> bit & 1U) != 0 ? matrix[bit] : 0U;
  return result;
}

Matrix squared(const Matrix& matrix) {
  Matrix result{};
  for (std::size_t bit = 0; bit < 32; ++bit) result[bit] = applied(matrix, matrix[bit]);
  return result;
}

// Too long to sum: the oracle squares the matrix of one zero bit.
TEST(Crc32cCombine, HoldsForTheLongestRuns) {
  Matrix zeros{0x82F63B78U};
  for (std::size_t bit = 1; bit < 32; ++bit) zeros[bit] = 1U << (bit - 1);
  for (int k = 0; k < 3; ++k) zeros = squared(zeros);  // of a byte
  const std::uint32_t first = 0x12345678U;
  const std::uint32_t second = 0x9ABCDEF0U;
  std::uint32_t longest = first;  // followed by 2^(k+1) - 1 zero bytes
  for (int k = 0; k <= 62; ++k) {
    const std::int64_t num_bytes = std::int64_t{1} << k;
    ASSERT_EQ(crc32c_combine(first, second, num_bytes), applied(zeros, first) ^ second) << k;
    longest = applied(zeros, longest);
    ASSERT_EQ(crc32c_combine(first, second, num_bytes - 1 + num_bytes), longest ^ second) << k;
    zeros = squared(zeros);
  }
}

TEST(Crc32cCombine, MakesAFilesSumFromItsBlocksSums) {
  const Bytes bytes = random_bytes(100000);
  std::uint32_t file = 0;
  for (std::int64_t at = 0; at < size_of(bytes);) {
    const std::int64_t size = std::min<std::int64_t>(4096, size_of(bytes) - at);
    file = crc32c_combine(file, crc32c(0, bytes.data() + at, size), size);
    at += size;
  }
  EXPECT_EQ(file, crc32c(0, bytes.data(), size_of(bytes)));
}

}  // namespace
}  // namespace tradewind
