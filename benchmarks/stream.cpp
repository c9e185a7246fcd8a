// The machine's own limit for one AdamW sweep: a loop with the same four reads and three writes per
// element and almost no arithmetic. And for the norm: a loop with its one read.
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace {

void on_threads(std::int64_t total, int num_threads,
                const std::function<void(std::int64_t, std::int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int t = 1; t < num_threads; ++t) {
    threads.emplace_back(body, total * t / num_threads, total * (t + 1) / num_threads);
  }
  body(0, total / num_threads);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

extern "C" void stream_update(float* __restrict parameter, const float* __restrict gradient,
                              float* __restrict first, float* __restrict second,
                              std::int64_t num_elements, int num_threads) {
  on_threads(num_elements, num_threads, [=](std::int64_t begin, std::int64_t end) {
#pragma GCC ivdep
    for (std::int64_t i = begin; i < end; ++i) {
      first[i] = first[i] + gradient[i];
      second[i] = second[i] + gradient[i];
      parameter[i] = parameter[i] + gradient[i];
    }
  });
}

extern "C" double stream_read(const float* values, std::int64_t num_elements, int num_threads) {
  std::vector<double> sums(static_cast<std::size_t>(num_threads) * 16);
  on_threads(num_elements, num_threads, [&](std::int64_t begin, std::int64_t end) {
    float lanes[64] = {};
    for (std::int64_t i = begin; i + 64 <= end; i += 64) {
      for (int lane = 0; lane < 64; ++lane) lanes[lane] += values[i + lane];
    }
    double sum = 0.0;
    for (const float lane : lanes) sum += static_cast<double>(lane);
    sums[static_cast<std::size_t>(begin * num_threads / num_elements) * 16] = sum;
  });
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}
