// What one phase of a rule makes of stored arrays. Element rules go through oracle_step(); the two
// phases of the others, which oracle_step() takes at once, are written out here.
#pragma once

#include "step/update_case.h"

namespace tradewind {

template <class Rule, class T>
void run_phase(const Update& update, Phase phase, OracleArrays<T>& arrays,
               std::vector<T>& directions) {
  if constexpr (Rule::kNeeds == Needs::kElement) {
    ADD_FAILURE() << Rule::kName << " has one phase";
  } else {
    typename Rule::Options options;
    std::memcpy(&options, update.options.data(), sizeof(options));
    const auto scalars = Rule::template scalars<T>(options, update.step, update.is_first);
    for (std::size_t i = 0; i < arrays.parameter.size(); ++i) {
      T states[Rule::kNumStates];
      for (std::size_t s = 0; s < Rule::kNumStates; ++s) states[s] = arrays.states[s][i];
      T& parameter = arrays.parameter[i];
      if (phase == Phase::kUpdate) {
        const T gradient = arrays.gradient[i] * static_cast<T>(update.multiplier);
        if constexpr (Rule::kNeeds == Needs::kNorms) {
          Rule::template advance<T>(scalars, gradient, parameter, states);
          directions[i] = Rule::template direction<T>(scalars, parameter, states);
        } else {
          directions[i] = Rule::template advance<T>(scalars, gradient, parameter, states);
        }
        for (std::size_t s = 0; s < Rule::kNumStates; ++s) arrays.states[s][i] = states[s];
      } else {
        if constexpr (Rule::kNeeds == Needs::kNorms) {
          directions[i] = Rule::template direction<T>(scalars, parameter, states);
        }
        Rule::template finish<T>(scalars, static_cast<T>(update.scale), directions[i], parameter);
      }
    }
  }
}

template <class T, class... Rules>
void run_phase_among(RuleList<Rules...>, const Update& update, Phase phase, OracleArrays<T>& arrays,
                     std::vector<T>& directions) {
  int idx = 0;
  ((idx++ == update.rule_idx ? run_phase<Rules, T>(update, phase, arrays, directions) : void()),
   ...);
}

template <class T>
UpdateArrays expected_arrays_in(const Storage& storage, const Update& update, Phase phase,
                                const UpdateArrays& before, Moves<T>& moves) {
  const Needs needs = update.rule().needs;
  OracleArrays<T> oracle{
      decode_parameter<T>(storage.master, before), decode_array<T>(before.gradient), {}};
  for (const StoredArray& state : before.states) oracle.states.push_back(decode_array<T>(state));
  const std::size_t count = oracle.parameter.size();
  std::vector<T> directions(count);
  if (before.direction.size() > 0) directions = decode_array<T>(before.direction);
  moves.before = oracle.parameter;
  if (needs == Needs::kElement) {
    oracle_step<T>(update.rule().name, update.options, update.step, update.is_first,
                   static_cast<T>(update.multiplier), oracle);
  } else {
    run_phase_among<T>(AllRules{}, update, phase, oracle, directions);
  }
  const bool moves_parameter = needs == Needs::kElement || phase == Phase::kFinish;
  UpdateArrays after = before;
  moves.change.assign(count, T(0));
  for (std::size_t i = 0; i < count; ++i) {
    if (moves_parameter) moves.change[i] = oracle.parameter[i] - moves.before[i];
    if (!moves_parameter && needs == Needs::kNorms) moves.change[i] = directions[i];
  }
  if (moves_parameter) encode_parameter(storage.master, oracle.parameter, after);
  if (phase == Phase::kFinish) return after;
  for (std::size_t s = 0; s < after.states.size(); ++s) {
    after.states[s] = encode_array(before.states[s].format, oracle.states[s],
                                   {update.random_key, update.first_element, static_cast<int>(s)});
  }
  if (needs == Needs::kMatrix) after.direction = encode_array(before.direction.format, directions);
  return after;
}

struct Expected {
  UpdateArrays arrays;
  // The moves, which are exact in float64.
  std::vector<double> before, change;
  // The sums over them by norm block, to the bit.
  std::vector<double> parameter_squares, change_squares;
};

inline Expected expected_update(const Storage& storage, const Update& update, Phase phase,
                                const UpdateArrays& arrays) {
  Expected expected;
  const auto run = [&]<class T>(Moves<T> moves) {
    expected.arrays = expected_arrays_in<T>(storage, update, phase, arrays, moves);
    expected.before.assign(moves.before.begin(), moves.before.end());
    expected.change.assign(moves.change.begin(), moves.change.end());
    expected.parameter_squares = lane_sums(moves.before);
    expected.change_squares = lane_sums(moves.change);
  };
  if (storage.is_double()) {
    run(Moves<double>{});
  } else {
    run(Moves<float>{});
  }
  return expected;
}

}  // namespace tradewind
