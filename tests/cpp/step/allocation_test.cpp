// A steady step allocates nothing: measure and sweep keep their scratch memory.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "step/sweep_case.h"

namespace {

std::int64_t num_allocations = 0;

void* counted(std::size_t size, std::size_t alignment) {
  ++num_allocations;
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), std::max<std::size_t>(size, 1)) !=
      0) {
    throw std::bad_alloc();
  }
  return memory;
}

// Inlined into operator delete, free() would look to g++ like one of what another new gave.
[[gnu::noinline]] void release(void* memory) noexcept { std::free(memory); }

}  // namespace

void* operator new(std::size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new[](std::size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace tradewind {
namespace {

template <class Step>
std::int64_t allocations_of(const Step& step) {
  const std::int64_t before = num_allocations;
  step();
  return num_allocations - before;
}

// Serial, since starting a std::thread allocates.
TEST(Allocations, OfASteadySweepAreNone) {
  SlotTable table = SlotTable::mixed();
  const std::vector<SweepSlot> slots = table.slots();
  const std::vector<ScalarBlock> scalars = table.scalars();
  const MatrixTransform transform = example_transform(table);
  for (const bool wants_changes : {false, true}) {
    Sweep sweep;
    const auto step = [&] {
      sweep.run(slots, scalars, {.wants_changes = wants_changes, .transform = &transform},
                kernels(), kSerial);
    };
    EXPECT_GT(allocations_of(step), 0);
    EXPECT_EQ(allocations_of(step), 0);
    EXPECT_EQ(allocations_of(step), 0);
  }
}

TEST(Allocations, OfASteadyMeasureAreNone) {
  SlotTable table = SlotTable::mixed();
  const std::vector<SweepSlot> slots = table.slots();
  BlockMeasure adopted[2];
  Measure measure;
  const auto step = [&] {
    measure.begin(slots);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i].num_elements != 5000) continue;
      kernels().measure[static_cast<int>(slots[i].gradient_dtype)](slots[i].gradient, 5000,
                                                                   adopted);
      measure.adopt(static_cast<std::int64_t>(i), adopted);
    }
    measure.run(kernels(), kSerial);
  };
  EXPECT_GT(allocations_of(step), 0);
  EXPECT_EQ(allocations_of(step), 0);
  // NaN and infinities are counted without memory, too.
  for (SlotTable::Entry& entry : table.entries()) {
    if (entry.storage.gradient == Format::kFloat32 && entry.num_elements() > 0) {
      entry.arrays.gradient.put(0, INFINITY);
    }
  }
  EXPECT_EQ(allocations_of(step), 0);
  EXPECT_GT(measure.num_nonfinite(), 0);
}

}  // namespace
}  // namespace tradewind
