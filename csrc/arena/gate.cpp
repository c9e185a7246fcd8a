#include "arena/gate.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/error.h"

namespace tradewind {
namespace {

using Address = std::uintptr_t;
using Clock = Gate::Clock;

constexpr auto kPiece = static_cast<Address>(GateClosing::kPieceBytes);

// Raised in every forked child: what was closed before belongs to another process, whose threads
// may have held its locks.
std::atomic<std::uint64_t> g_generation{0};

struct Closed {
  Address begin, end;
  std::size_t first_piece;  // pieces of all ranges are numbered through

  [[nodiscard]] std::size_t num_pieces() const {
    return static_cast<std::size_t>((end - 1) / kPiece - begin / kPiece) + 1;
  }
};

// Calls visit(piece, first byte, end) for each piece's part of [begin, end).
template <class Visit>
void visit_pieces(const Closed& range, Address begin, Address end, const Visit& visit) {
  begin = std::max(begin, range.begin);
  end = std::min(end, range.end);
  while (begin < end) {
    const Address piece_end = std::min(end, (begin / kPiece + 1) * kPiece);
    visit(range.first_piece + static_cast<std::size_t>(begin / kPiece - range.begin / kPiece),
          begin, piece_end);
    begin = piece_end;
  }
}

Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

// In order, without overlaps; neighbours stay apart, as each is a range of its own to a sweep.
std::vector<Closed> in_order(std::span<const MemoryRange> ranges) {
  std::vector<Closed> sorted;
  for (const MemoryRange& range : ranges) {
    if (range.size_bytes < 0) {
      fail(ErrorKind::kBadValue, "gate: expected ranges of zero or more bytes, got ",
           range.size_bytes);
    }
    if (range.size_bytes == 0) continue;
    const Address begin = address_of(range.begin);
    sorted.push_back({begin, begin + static_cast<Address>(range.size_bytes), 0});
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const Closed& a, const Closed& b) { return a.begin < b.begin; });
  std::vector<Closed> merged;
  for (const Closed& range : sorted) {
    if (!merged.empty() && range.begin < merged.back().end) {
      merged.back().end = std::max(merged.back().end, range.end);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

}  // namespace

struct GateClosing::State {
  explicit State(std::span<const MemoryRange> given) : ranges(in_order(given)) {
    std::size_t num_pieces = 0;
    for (Closed& range : ranges) {
      range.first_piece = num_pieces;
      num_pieces += range.num_pieces();
      held.fetch_add(static_cast<std::int64_t>(range.end - range.begin));
    }
    pieces = std::vector<std::atomic<std::int64_t>>(num_pieces);
    for (const Closed& range : ranges) {
      visit_pieces(range, range.begin, range.end,
                   [&](std::size_t piece, Address begin, Address end) {
                     pieces[piece] = static_cast<std::int64_t>(end - begin);
                   });
    }
  }

  [[nodiscard]] bool is_ours() const { return generation == g_generation.load(); }
  [[nodiscard]] bool is_piece_open(std::size_t piece) const {
    return pieces[piece].load(std::memory_order_acquire) <= 0;
  }

  // The first range that ends behind this address.
  [[nodiscard]] std::vector<Closed>::const_iterator find(Address address) const {
    return std::upper_bound(ranges.begin(), ranges.end(), address,
                            [](Address a, const Closed& range) { return a < range.end; });
  }

  template <class Visit>
  void visit(Address begin, Address end, const Visit& visit_one) const {
    for (auto range = find(begin); range != ranges.end() && range->begin < end; ++range) {
      visit_pieces(*range, begin, end, visit_one);
    }
  }

  void wake() {
    // Whoever found its piece closed sleeps before this lock is given, or sees it open after.
    {
      const std::scoped_lock lock(mutex);
    }
    opened.notify_all();
  }

  bool wait(Address begin, Address end, const Clock::time_point* deadline) {
    bool is_open = true;
    visit(begin, end, [&](std::size_t piece, Address, Address) {
      is_open = is_open && (is_piece_open(piece) || sleep(piece, deadline));
    });
    return is_open;
  }

  bool sleep(std::size_t piece, const Clock::time_point* deadline) {
    std::unique_lock lock(mutex);
    if (num_waiting++ == 0) waiting_since = Clock::now();
    const auto is_open = [&] { return is_piece_open(piece); };
    bool came = true;
    if (deadline == nullptr) {
      opened.wait(lock, is_open);
    } else {
      came = opened.wait_until(lock, *deadline, is_open);
    }
    if (--num_waiting == 0) waited += Clock::now() - waiting_since;
    return came;
  }

  std::vector<Closed> ranges;
  std::vector<std::atomic<std::int64_t>> pieces;  // bytes of each that are not released
  std::atomic<std::int64_t> held{0};              // of all
  std::atomic<bool> is_open{false};
  const std::uint64_t generation = g_generation.load();

  std::mutex mutex;  // of what follows
  std::condition_variable opened;
  int num_waiting = 0;
  Clock::time_point waiting_since;
  Clock::duration waited{0};
};

// --- a closing -----------------------------------------------------------------------------------

GateClosing::GateClosing(std::shared_ptr<State> state) : state_(std::move(state)) {}

GateClosing::~GateClosing() noexcept {
  if (state_->is_ours()) {
    open();
  } else {
    // Its locks may be held by threads that are not there: it stays, and is never touched.
    (void)new std::shared_ptr<State>(std::move(state_));
  }
}

void GateClosing::release(const void* begin, std::int64_t size_bytes) noexcept {
  if (!state_->is_ours() || size_bytes <= 0) return;
  bool has_opened = false;
  std::int64_t num_released = 0;
  const Address first = address_of(begin);
  state_->visit(first, first + static_cast<Address>(size_bytes),
                [&](std::size_t piece, Address from, Address to) {
                  const auto bytes = static_cast<std::int64_t>(to - from);
                  num_released += bytes;
                  // After what the caller read of these bytes; a writer's acquire comes after this.
                  has_opened |= state_->pieces[piece].fetch_sub(bytes) == bytes;
                });
  if (has_opened) state_->wake();
  if (num_released > 0 && state_->held.fetch_sub(num_released) == num_released) open();
}

void GateClosing::open() noexcept {
  if (!state_->is_ours() || state_->is_open.exchange(true)) return;
  for (std::atomic<std::int64_t>& piece : state_->pieces) piece.store(0);
  state_->wake();
  memory_gate().remove(state_);
}

double GateClosing::waited_s() const {
  if (!state_->is_ours()) return 0.0;
  const std::scoped_lock lock(state_->mutex);
  Clock::duration waited = state_->waited;
  if (state_->num_waiting > 0) waited += Clock::now() - state_->waiting_since;
  return std::chrono::duration<double>(waited).count();
}

std::int64_t GateClosing::held_bytes() const noexcept {
  if (!state_->is_ours() || state_->is_open) return 0;
  return std::max<std::int64_t>(state_->held.load(), 0);
}

double GateClosing::position_of(const void* address) const noexcept {
  const Address there = address_of(address);
  const auto range = state_->find(there);
  if (range == state_->ranges.end() || there < range->begin) return 1.0;
  return static_cast<double>(there - range->begin) / static_cast<double>(range->end - range->begin);
}

// --- the gate ------------------------------------------------------------------------------------

struct Gate::Guarded {
  std::mutex mutex;
  // Replaced as a whole, so that whoever waits goes over a list that stays as it is.
  std::shared_ptr<const States> states = std::make_shared<const States>();
};

Gate::Gate() : guarded_(new Guarded) {
  // A fork at any moment then leaves the child a gate that it can use.
  (void)pthread_atfork([] { memory_gate().lock_for_fork(); },
                       [] { memory_gate().unlock_after_fork(); },
                       [] { memory_gate().open_in_child(); });
}

Gate& memory_gate() {
  static Gate* const gate = new Gate;
  return *gate;
}

std::shared_ptr<GateClosing> Gate::close(std::span<const MemoryRange> ranges) {
  auto state = std::make_shared<GateClosing::State>(ranges);
  auto closing = std::make_shared<GateClosing>(state);
  if (state->ranges.empty()) {
    state->is_open = true;
    return closing;
  }
  const std::scoped_lock lock(guarded_->mutex);
  auto states = std::make_shared<States>(*guarded_->states);
  states->push_back(std::move(state));
  guarded_->states = std::move(states);
  num_closed_.fetch_add(1);
  return closing;
}

void Gate::remove(const std::shared_ptr<GateClosing::State>& state) noexcept {
  const std::scoped_lock lock(guarded_->mutex);
  auto states = std::make_shared<States>(*guarded_->states);
  if (std::erase(*states, state) == 0) return;
  guarded_->states = std::move(states);
  num_closed_.fetch_sub(1);
}

bool Gate::wait_closed(const void* begin, std::int64_t size_bytes,
                       const Clock::time_point* deadline) const {
  if (size_bytes <= 0) return true;
  std::shared_ptr<const States> states;
  {
    const std::scoped_lock lock(guarded_->mutex);
    states = guarded_->states;
  }
  const Address first = address_of(begin);
  return std::all_of(states->begin(), states->end(), [&](const auto& state) {
    return state->wait(first, first + static_cast<Address>(size_bytes), deadline);
  });
}

void Gate::lock_for_fork() noexcept { guarded_->mutex.lock(); }

void Gate::unlock_after_fork() noexcept { guarded_->mutex.unlock(); }

void Gate::open_in_child() noexcept {
  g_generation.fetch_add(1);
  num_closed_.store(0);
  // Kept, as ~GateClosing() keeps them.
  (void)new std::shared_ptr<const States>(
      std::exchange(guarded_->states, std::make_shared<const States>()));
  guarded_->mutex.unlock();
}

}  // namespace tradewind
