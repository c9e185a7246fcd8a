// Rules over arrays in every combination of stored formats: decoded by the tests' definitions,
// updated by the oracle in the kernel's precision, encoded by the definitions. To the bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "step/kernel_case.h"

namespace tradewind {
namespace {

constexpr std::array kStateFormats{Format::kFloat32, Format::kBFloat16, Format::kStochasticBFloat16,
                                   Format::kSigned8, Format::kFloat16};

// Every parameter with every master that it can have, under every gradient dtype, and with states
// of one format, of three, and with a last one that differs.
std::vector<Storage> storages() {
  const std::vector<std::pair<Format, Master>> parameters{
      {Format::kFloat32, Master::kNone},   {Format::kFloat64, Master::kNone},
      {Format::kBFloat16, Master::kNone},  {Format::kBFloat16, Master::kFloat32},
      {Format::kBFloat16, Master::kSplit}, {Format::kFloat16, Master::kNone},
      {Format::kFloat16, Master::kFloat32}};
  std::vector<Storage> all;
  for (const auto& [parameter, master] : parameters) {
    for (int gradient = 0; gradient < kNumFloatingDTypes; ++gradient) {
      for (std::size_t s = 0; s < kStateFormats.size(); ++s) {
        const Format state = kStateFormats[s];
        all.push_back({parameter, master, static_cast<Format>(gradient), {state, state, state}});
        all.push_back({parameter,
                       master,
                       static_cast<Format>(gradient),
                       {state, kStateFormats[(s + 1) % 5], kStateFormats[(s + 3) % 5]}});
        if (gradient > 0) continue;
        const Format plain = parameter == Format::kFloat64 ? parameter : Format::kFloat32;
        all.push_back({parameter, master, static_cast<Format>(gradient), {plain, plain, state}});
      }
    }
  }
  return all;
}

// One for each way that a kernel takes an array, for what needs no cross product.
std::vector<Storage> few_storages() {
  using enum Format;
  return {{kBFloat16, Master::kNone, kFloat32, {kSigned8, kStochasticBFloat16, kSigned8}},
          {kBFloat16, Master::kSplit, kBFloat16, {kStochasticBFloat16, kSigned8, kSigned8}},
          {kFloat16, Master::kFloat32, kFloat16, {kBFloat16, kBFloat16, kFloat32}},
          {kFloat32, Master::kNone, kFloat64, {kSigned8, kSigned8, kSigned8}},
          {kFloat64, Master::kNone, kFloat16, {kSigned8, kStochasticBFloat16, kFloat64}}};
}

class StorageKernels : public testing::TestWithParam<std::tuple<std::string_view, int>> {
 protected:
  [[nodiscard]] int rule_idx() const { return std::get<1>(GetParam()); }
  [[nodiscard]] const RuleInfo& rule() const {
    return rules()[static_cast<std::size_t>(rule_idx())];
  }
  void check(const Storage& storage, const Update& update, std::size_t count, std::size_t shift) {
    for (const Phase phase : phases_of(rule())) {
      const UpdateArrays before = sample_arrays(rule(), storage, count, count + 3);
      check_kernel({kernels_for(std::get<0>(GetParam())), storage, update, phase, shift}, before,
                   expected_update(storage, update, phase, before));
    }
  }
};

TEST_P(StorageKernels, AgreeWithTheDefinitionsInEveryCombination) {
  const std::vector<Update> updates = example_updates(rule_idx());
  std::size_t idx = 0;
  for (const Storage& storage : storages()) {
    // Two chunks, and a tail that fills neither a vector nor an exponent block.
    check(storage, updates[idx % updates.size()], 547, idx % 2);
    if (HasFatalFailure()) FAIL() << "storage " << idx;
    ++idx;
  }
}

// NaN equals NaN in these comparisons: few of them, or they would show little.
TEST_P(StorageKernels, TheSamplesStayNumbersForTheMostPart) {
  for (const Storage& storage : storages()) {
    const Update update = example_updates(rule_idx())[1];
    const UpdateArrays before = sample_arrays(rule(), storage, 547, 550);
    for (const Phase phase : phases_of(rule())) {
      const Expected expected = expected_update(storage, update, phase, before);
      std::vector<double> values = decode_parameter<double>(storage.master, expected.arrays);
      const auto is_nan = [](double value) { return std::isnan(value); };
      EXPECT_LT(std::ranges::count_if(values, is_nan), 547 / 4);
      for (const StoredArray& state : expected.arrays.states) {
        values = decode_array<double>(state);
        EXPECT_LT(std::ranges::count_if(values, is_nan), 547 / 4);
      }
    }
  }
}

TEST_P(StorageKernels, AgreeWithTheDefinitionsAtEveryLength) {
  std::vector<std::size_t> lengths{4095, 4096, 4097, 4096 + 511, 9000};
  for (std::size_t length = 0; length <= 70; ++length) lengths.push_back(length);
  for (const std::size_t edge : {256, 512, 768, 1024}) {
    for (std::size_t length = edge - 2; length <= edge + 2; ++length) lengths.push_back(length);
  }
  for (const std::size_t length : lengths) {
    const std::vector<Storage> all = few_storages();
    check(all[length % all.size()], example_updates(rule_idx())[1], length, 1);
    if (HasFatalFailure()) FAIL() << "length " << length;
  }
}

TEST_P(StorageKernels, RoundByThePlaceOfAnElementInItsParameter) {
  for (const std::int64_t first : {std::int64_t{4096}, (std::int64_t{1} << 33) + 8192}) {
    for (const Storage& storage : few_storages()) {
      Update update = example_updates(rule_idx())[1];
      update.first_element = first;
      update.random_key = 0xABCDEF01;
      check(storage, update, 700, 0);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(StorageKernels, PropagateNaNAndInfinityAsTheDefinitionsDo) {
  for (const Storage& storage : few_storages()) {
    const Update update = example_updates(rule_idx())[0];
    for (const Phase phase : phases_of(rule())) {
      UpdateArrays before = sample_arrays(rule(), storage, 1500, 21);
      std::vector<double> gradient = decode_array<double>(before.gradient);
      // The first and third exponent block stay finite.
      for (const std::size_t place : {300, 1290}) gradient[place] = INFINITY;
      gradient[301] = NAN;
      before.gradient = encode_array(before.gradient.format, gradient);
      std::vector<double> parameter = decode_parameter<double>(storage.master, before);
      parameter[1200] = NAN;
      parameter[1201] = -INFINITY;
      encode_parameter(storage.master, parameter, before);
      check_kernel({kernels_for(std::get<0>(GetParam())), storage, update, phase, 1}, before,
                   expected_update(storage, update, phase, before));
      if (HasFatalFailure()) return;
    }
  }
}

std::string name_of(const testing::TestParamInfo<StorageKernels::ParamType>& info) {
  const auto& [isa, rule_idx] = info.param;
  return std::string(isa) + "_" + std::string(rules()[static_cast<std::size_t>(rule_idx)].name);
}

INSTANTIATE_TEST_SUITE_P(All, StorageKernels,
                         testing::Combine(testing::ValuesIn(supported_isas()),
                                          testing::Range(0, num_rules())),
                         name_of);

}  // namespace
}  // namespace tradewind
