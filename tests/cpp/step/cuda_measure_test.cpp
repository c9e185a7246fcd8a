// Measure and combine over the emulated grid, against the CPU's measure: every bit.
#include <gtest/gtest.h>

#include <limits>

#include "step/cuda_steps.h"

namespace tradewind {
namespace {

class CudaMeasure : public CudaTest {};

constexpr Format kGradientFormats[] = {Format::kFloat32, Format::kFloat64, Format::kBFloat16,
                                       Format::kFloat16};

CudaSlotSpec gradient_of(Format format, std::int64_t num_elements, std::size_t shift = 0) {
  CudaSlotSpec spec;
  spec.rule_idx = find_rule("sgd");
  spec.gradient = format;
  spec.num_elements = num_elements;
  spec.shift = shift;
  return spec;
}

// Around every boundary of the loops, empty ones first, between and last.
CudaTable mixed_gradients() {
  CudaTable table;
  std::size_t idx = 0;
  for (const std::int64_t length :
       {0, 1, 31, 33, 0, 0, 127, 129, 511, 512, 513, 640, 4095, 4096, 4097, 9000, 0}) {
    for (const Format format : kGradientFormats) {
      table.add(gradient_of(format, length, idx++ % 3));
    }
  }
  return table;
}

void measure(CudaTable& table) {
  table.bind();
  ASSERT_EQ(tradewind_cuda_measure(&table.c(), nullptr, nullptr), 0) << cuda_emulation::failure();
  ASSERT_EQ(tradewind_cuda_combine(&table.c(), nullptr), 0) << cuda_emulation::failure();
}

Measure cpu_measure(CudaTable& table, std::vector<SweepSlot>& slots) {
  for (CudaEntry& entry : table.entries()) slots.push_back(sweep_slot(entry));
  Measure measure;
  measure.begin(slots);
  measure.run(kernels_for("baseline"), kSerial);
  return measure;
}

void expect_same_sum(double want, double got, const std::string& what) {
  if (std::isnan(want) && std::isnan(got)) return;
  EXPECT_EQ(want, got) << what;
}

void expect_cpus_measure(CudaTable& table) {
  std::vector<SweepSlot> slots;
  const Measure cpu = cpu_measure(table, slots);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const SlotMeasure& want = cpu.slots()[i];
    const TradewindCudaMeasure& got = table.slot_measures()[i];
    const std::string what = "slot " + std::to_string(i);
    expect_same_sum(want.sum_of_squares, got.sum_of_squares, what);
    expect_same_sum(want.max_abs, got.max_abs, what);
    // With a NaN the CPU's sweep ends early: it has its answer.
    if (!std::isnan(want.max_abs)) {
      EXPECT_EQ(want.num_zeros, got.num_zeros) << what;
    }
  }
  expect_same_sum(cpu.sum_of_squares(), table.outcome().sum_of_squares, "all");
  EXPECT_EQ(cpu.first_nonfinite_slot(), table.outcome().first_nonfinite_slot);
  EXPECT_EQ(cpu.num_nonfinite() > 0, table.outcome().num_nonfinite_slots > 0.0);
}

void expect_cpu_kernels_blocks(CudaTable& table) {
  std::size_t block = 0;
  for (CudaEntry& entry : table.entries()) {
    std::vector<BlockMeasure> want(
        static_cast<std::size_t>(num_norm_blocks(entry.spec.num_elements)));
    kernels_for("baseline")
        .measure[static_cast<int>(entry.spec.gradient)](entry.gradient.data(),
                                                        entry.spec.num_elements, want.data());
    for (const BlockMeasure& expected : want) {
      const TradewindCudaMeasure& got = table.block_measures()[block];
      const std::string what = "block " + std::to_string(block++);
      expect_same_sum(expected.sum_of_squares, got.sum_of_squares, what);
      expect_same_sum(expected.max_abs, got.max_abs, what);
      EXPECT_EQ(expected.num_zeros, got.num_zeros) << what;
    }
  }
  EXPECT_EQ(block, table.block_measures().size());
}

TEST_F(CudaMeasure, BlocksHaveTheCpuKernelsBits) {
  for (const std::uint64_t seed : {0, 5}) {
    cuda_emulation::set_order(seed);
    CudaTable table = mixed_gradients();
    measure(table);
    expect_cpu_kernels_blocks(table);
    expect_cpus_measure(table);
  }
}

TEST_F(CudaMeasure, NanAndInfinityAreFoundWhereverTheyAre) {
  for (const double value :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
        -std::numeric_limits<double>::infinity()}) {
    for (const std::size_t slot : {40U, 60U}) {
      for (const std::size_t element : {0U, 511U, 4094U}) {
        CudaTable table = mixed_gradients();
        for (std::size_t i = slot; i < slot + 4; ++i) {  // of each format
          CudaEntry& entry = table.entries()[i];
          const auto count = static_cast<std::size_t>(entry.spec.num_elements);
          write_element(entry.spec.gradient, value, std::min(element, count - 1),
                        entry.gradient.data());
        }
        measure(table);
        expect_cpu_kernels_blocks(table);
        expect_cpus_measure(table);
        EXPECT_EQ(table.outcome().num_nonfinite_slots, 4.0);
        EXPECT_EQ(table.outcome().first_nonfinite_slot, static_cast<std::int64_t>(slot));
      }
    }
  }
}

// Finite elements whose squares overflow are no reason for a veto.
TEST_F(CudaMeasure, AnOverflowOfTheSumIsNotAnInfiniteElement) {
  CudaTable table;
  table.add(gradient_of(Format::kFloat64, 100));
  table.entries()[0].gradient.as<double>()[7] = 1e200;
  measure(table);
  EXPECT_TRUE(std::isinf(table.outcome().sum_of_squares));
  EXPECT_EQ(table.outcome().num_nonfinite_slots, 0.0);
  EXPECT_EQ(table.outcome().first_nonfinite_slot, -1);
}

TEST_F(CudaMeasure, ThreeThousandSlotsAndOneOfManyBlocks) {
  CudaTable table;
  for (int i = 0; i < 3000; ++i) {
    const std::int64_t length = i % 7 == 0 ? 0 : i % 97;
    table.add(gradient_of(kGradientFormats[i % 4], length));
  }
  table.add(gradient_of(Format::kBFloat16, 600 * kNormBlockElements + 5));
  table.add(gradient_of(Format::kFloat32, 100 * kNormBlockElements));
  table.add(gradient_of(Format::kFloat32, 0));
  cuda_emulation::set_order(3);
  measure(table);
  expect_cpus_measure(table);
  EXPECT_EQ(cuda_emulation::counts().launches, 3);
}

TEST_F(CudaMeasure, TheFirstOfManyNonFiniteSlotsIsNamed) {
  CudaTable table;
  for (int i = 0; i < 500; ++i) table.add(gradient_of(Format::kFloat32, 3));
  for (const std::size_t slot : {43U, 75U, 107U, 80U, 499U}) {  // some in one lane
    table.entries()[slot].gradient.as<float>()[1] = std::numeric_limits<float>::infinity();
  }
  measure(table);
  EXPECT_EQ(table.outcome().first_nonfinite_slot, 43);
  EXPECT_EQ(table.outcome().num_nonfinite_slots, 5.0);
}

TEST_F(CudaMeasure, NothingToMeasureIsZero) {
  CudaTable table;
  table.add(gradient_of(Format::kFloat32, 0));
  measure(table);
  EXPECT_EQ(table.outcome().sum_of_squares, 0.0);
  EXPECT_EQ(table.outcome().first_nonfinite_slot, -1);
  CudaTable none;
  none.control().outcome.sum_of_squares = 5.0;
  measure(none);
  EXPECT_EQ(none.outcome().sum_of_squares, 0.0);
}

// As hooks do in backward: some at a time, in the order in which they arrive.
TEST_F(CudaMeasure, ListsMeasureTheirOwnSlotsAlone) {
  CudaTable whole = mixed_gradients();
  measure(whole);
  CudaTable table = mixed_gradients();
  table.bind();
  const TradewindCudaMeasure untouched{-1.0, -1.0, -1};
  table.block_measures().assign(table.block_measures().size(), untouched);
  table.c().block_measures = table.block_measures().data();
  const CudaList first(table, {60, 3, 20, 0, 52});
  ASSERT_EQ(tradewind_cuda_measure(&table.c(), first.c(), nullptr), 0);
  for (std::size_t i = 0; i < table.slots().size(); ++i) {
    const bool is_listed = i == 60 || i == 3 || i == 20 || i == 0 || i == 52;
    for (std::int64_t b = 0; b < num_norm_blocks(table.slots()[i].num_elements); ++b) {
      const auto block = static_cast<std::size_t>(table.slots()[i].first_block + b);
      EXPECT_EQ(table.block_measures()[block].sum_of_squares,
                is_listed ? whole.block_measures()[block].sum_of_squares : -1.0);
    }
  }
}

}  // namespace
}  // namespace tradewind
