// 64-bit FNV-1a (Fowler, Noll, Vo; draft-eastlake-fnv): tells two descriptions apart, byte by byte
// the same on every machine. It guards against mistakes, not against an attacker.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tradewind {

class Fingerprint {
 public:
  void add(std::string_view text) {
    add(static_cast<std::int64_t>(text.size()));
    for (const char character : text) add_byte(static_cast<unsigned char>(character));
  }

  void add(std::int64_t value) {
    const auto bits = static_cast<std::uint64_t>(value);
    for (int shift = 0; shift < 64; shift += 8) {
      add_byte(static_cast<unsigned char>((bits >> shift) & 0xFFU));
    }
  }

  [[nodiscard]] std::uint64_t value() const noexcept { return value_; }

  // Sixteen lower-case hexadecimal digits.
  [[nodiscard]] std::string hex() const {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text(16, '0');
    for (std::size_t i = 0; i < 16; ++i) text[i] = kDigits[(value_ >> (60 - 4 * i)) & 0xFU];
    return text;
  }

 private:
  void add_byte(unsigned char byte) { value_ = (value_ ^ byte) * 0x100000001B3ULL; }

  std::uint64_t value_ = 0xCBF29CE484222325ULL;
};

}  // namespace tradewind
