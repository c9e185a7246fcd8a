// Accumulation into float32 gradients over the emulated grid, with the measure in the same pass.
#include <gtest/gtest.h>

#include "step/cuda_steps.h"

namespace tradewind {
namespace {

class CudaIngest : public CudaTest {};

CudaSlotSpec gradient_of(std::int64_t num_elements, std::size_t shift = 0) {
  CudaSlotSpec spec;
  spec.rule_idx = find_rule("sgd");
  spec.num_elements = num_elements;
  spec.shift = shift;
  return spec;
}

struct Ingested {
  std::vector<GuardedBytes> memory;
  std::vector<TradewindCudaSource> sources;
};

Ingested sample_sources(CudaTable& table, const std::vector<std::int32_t>& slot_idx) {
  constexpr Format kFormats[] = {Format::kFloat32, Format::kBFloat16, Format::kFloat16};
  Ingested ingested;
  for (std::size_t i = 0; i < slot_idx.size(); ++i) {
    const auto& spec = table.entries()[static_cast<std::size_t>(slot_idx[i])].spec;
    const Format format = kFormats[i % 3];
    ingested.memory.push_back(
        sample_bytes(format, static_cast<std::size_t>(spec.num_elements), i % 2, 700 + i));
    ingested.sources.push_back({ingested.memory.back().data(), static_cast<int>(format)});
  }
  return ingested;
}

float value_at(const TradewindCudaSource& source, std::size_t i) {
  const auto half = [&] { return static_cast<const std::uint16_t*>(source.values)[i]; };
  switch (static_cast<Format>(source.format)) {
    case Format::kFloat32: return static_cast<const float*>(source.values)[i];
    case Format::kBFloat16: return from_bfloat16(half());
    default: return static_cast<float>(static_cast<const _Float16*>(source.values)[i]);
  }
}

TEST_F(CudaIngest, AddsOrOverwritesAndMeasuresTheSum) {
  const std::vector<std::int32_t> listed{5, 0, 3, 8, 1, 7, 2, 4};
  for (const bool overwrites : {false, true}) {
    CudaTable table;
    for (const std::int64_t length : {4097, 100, 0, 8192, 33, 12, 1, 5000, 0}) {
      table.add(gradient_of(length, length % 3 == 0 ? 1 : 0));
    }
    Ingested ingested = sample_sources(table, listed);
    CudaTable expected = table;
    for (std::size_t i = 0; i < listed.size(); ++i) {
      CudaEntry& entry = expected.entries()[static_cast<std::size_t>(listed[i])];
      for (std::size_t e = 0; e < static_cast<std::size_t>(entry.spec.num_elements); ++e) {
        float& gradient = entry.gradient.as<float>()[e];
        const float source = value_at(ingested.sources[i], e);
        gradient = overwrites ? source : gradient + source;
      }
    }
    table.bind();
    const CudaList list(table, listed);
    cuda_emulation::set_order(4);
    ASSERT_EQ(tradewind_cuda_ingest(&table.c(), list.c(), ingested.sources.data(),
                                    overwrites ? 1 : 0, 1, nullptr),
              0);
    expect_same_memory(expected, table);
    expected.bind();
    ASSERT_EQ(tradewind_cuda_measure(&expected.c(), nullptr, nullptr), 0);
    for (std::size_t i = 0; i < table.slots().size(); ++i) {
      const TradewindCudaSlot& slot = table.slots()[i];
      for (std::int64_t b = 0; b < num_norm_blocks(slot.num_elements); ++b) {
        const auto block = static_cast<std::size_t>(slot.first_block + b);
        const TradewindCudaMeasure& got = table.block_measures()[block];
        const TradewindCudaMeasure& want = expected.block_measures()[block];
        const bool is_listed = i != 6;
        EXPECT_EQ(got.sum_of_squares, is_listed ? want.sum_of_squares : 0.0) << "slot " << i;
        EXPECT_EQ(got.num_zeros, is_listed ? want.num_zeros : 0) << "slot " << i;
      }
    }
  }
}

TEST_F(CudaIngest, MeasuresOnlyWhenAsked) {
  CudaTable table;
  table.add(gradient_of(5000));
  const Ingested ingested = sample_sources(table, {0});
  table.bind();
  ASSERT_EQ(tradewind_cuda_ingest(&table.c(), nullptr, ingested.sources.data(), 0, 0, nullptr), 0);
  EXPECT_EQ(table.block_measures()[0].sum_of_squares, 0.0);
  EXPECT_EQ(table.block_measures()[1].sum_of_squares, 0.0);
}

}  // namespace
}  // namespace tradewind
