// The instruction sets that kernels are compiled for, and the one of this process: the best of its
// processor, or TRADEWIND_ISA. Rooms with kernels keep a table by Isa.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace tradewind {

// Slowest first; a processor that supports one supports those before it.
enum class Isa : std::uint8_t { kBaseline, kAvx2, kAvx512 };

// Names of those that this processor supports, slowest first.
std::vector<std::string_view> supported_isas();
// Throws Error(kBadValue) for a name that is unknown or not supported here.
Isa isa_named(std::string_view name);
// Reads TRADEWIND_ISA once. Throws as isa_named() does.
Isa process_isa();

}  // namespace tradewind
