// Memory to be saved, what its file must be, and the checksums of that by the definition.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/split_mix.h"
#include "checkpoint/shard_writer.h"

namespace tradewind {

// Bit by bit, by the reflected polynomial of RFC 3720.
inline std::uint32_t reference_crc32c(const char* data, std::size_t size) {
  std::uint32_t crc = 0xFFFFFFFFU;
  for (std::size_t i = 0; i < size; ++i) {
    crc ^= static_cast<unsigned char>(data[i]);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1U ^ ((crc & 1U) != 0 ? 0x82F63B78U : 0U);
  }
  return ~crc;
}

// Bytes at an address that is `misalignment` beyond a page.
class Bytes {
 public:
  Bytes(std::int64_t size_bytes, std::int64_t misalignment, std::uint64_t seed)
      : size_bytes_(size_bytes),
        memory_(static_cast<std::size_t>(size_bytes + misalignment + kFilePageBytes)) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    begin_ = memory_.data() +
             (kFilePageBytes - static_cast<std::int64_t>(address) % kFilePageBytes) + misalignment;
    SplitMix random(seed);
    for (std::int64_t i = 0; i < size_bytes; ++i) begin_[i] = static_cast<char>(random.next());
  }
  Bytes(Bytes&&) = default;

  [[nodiscard]] char* data() { return begin_; }
  [[nodiscard]] const char* data() const { return begin_; }
  [[nodiscard]] std::int64_t size() const { return size_bytes_; }
  [[nodiscard]] std::string text() const { return {begin_, static_cast<std::size_t>(size_bytes_)}; }

 private:
  std::int64_t size_bytes_;
  std::vector<char> memory_;  // moves keep its address
  char* begin_;
};

struct ShardCase {
  // Sizes of regions, one after the other at the next page, or where `gaps` has pages, so many
  // later.
  ShardCase(const std::vector<std::int64_t>& sizes, std::int64_t misalignment,
            std::int64_t the_block_bytes, std::int64_t gap_pages = 0)
      : block_bytes(the_block_bytes), header(2 * kFilePageBytes, ' ') {
    std::memcpy(header.data(), "a header", 8);
    file = header;
    for (const std::int64_t size : sizes) {
      memory.emplace_back(size, misalignment, memory.size() + 1);
      file.resize(file.size() + static_cast<std::size_t>(gap_pages * kFilePageBytes));
      offsets.push_back(static_cast<std::int64_t>(file.size()));
      file += memory.back().text();
      file.resize(
          static_cast<std::size_t>(round_up_to_page(static_cast<std::int64_t>(file.size()))));
    }
  }

  [[nodiscard]] ShardWriter::Request request(std::shared_ptr<Env> env, const std::string& path) {
    ShardWriter::Request made;
    made.env = std::move(env);
    made.path = path;
    made.header = header;
    made.block_bytes = block_bytes;
    for (std::size_t i = 0; i < memory.size(); ++i) {
      made.regions.push_back({offsets[i], memory[i].data(), memory[i].size()});
    }
    return made;
  }

  [[nodiscard]] std::vector<MemoryRange> ranges() const {
    std::vector<MemoryRange> found;
    for (const Bytes& bytes : memory) found.push_back({bytes.data(), bytes.size()});
    return found;
  }

  // By the definition, which takes its time: once.
  [[nodiscard]] const std::vector<std::uint32_t>& block_crc32c() const {
    for (std::size_t begin = sums_.size() * static_cast<std::size_t>(block_bytes);
         begin < file.size(); begin += static_cast<std::size_t>(block_bytes)) {
      sums_.push_back(
          reference_crc32c(file.data() + begin,
                           std::min(static_cast<std::size_t>(block_bytes), file.size() - begin)));
    }
    return sums_;
  }
  [[nodiscard]] std::uint32_t crc32c() const {
    if (!whole_) whole_ = reference_crc32c(file.data(), file.size());
    return *whole_;
  }

  std::int64_t block_bytes;
  std::string header;
  std::vector<Bytes> memory;
  std::vector<std::int64_t> offsets;
  std::string file;  // what it must be

 private:
  mutable std::vector<std::uint32_t> sums_;
  mutable std::optional<std::uint32_t> whole_;
};

// The system's Env lives as long as the process.
inline std::shared_ptr<Env> shared_posix_env() { return {std::shared_ptr<void>(), &posix_env()}; }

inline std::chrono::steady_clock::time_point in_a_minute() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(1);
}

}  // namespace tradewind
