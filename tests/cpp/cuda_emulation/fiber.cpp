#include "cuda_emulation/fiber.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// tradewind_switch_stack saves the registers that a call preserves and the stack's place in *from,
// and continues where `to` was saved. swapcontext() would do it with two system calls, a hundred
// times as slow. tradewind_start_fiber calls the function in rbp with the argument in rbx.
#if defined(__x86_64__)
extern "C" void tradewind_switch_stack(void** from, void* to);
extern "C" void tradewind_start_fiber();
asm(R"(
.text
.globl tradewind_switch_stack
.hidden tradewind_switch_stack
.type tradewind_switch_stack, @function
tradewind_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tradewind_switch_stack, .-tradewind_switch_stack

.globl tradewind_start_fiber
.hidden tradewind_start_fiber
.type tradewind_start_fiber, @function
tradewind_start_fiber:
  movq %rbx, %rdi
  callq *%rbp
  ud2
.size tradewind_start_fiber, .-tradewind_start_fiber
)");
#endif

namespace cuda_emulation {
namespace {

constexpr std::size_t kStackBytes = std::size_t{256} << 10U;

// Which stack is left and which entered, for the address sanitizer.
void begin_switch([[maybe_unused]] void** left, [[maybe_unused]] const void* bottom,
                  [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(left, bottom, bytes);
#endif
}

void end_switch([[maybe_unused]] void* entered, [[maybe_unused]] const void** bottom,
                [[maybe_unused]] std::size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(entered, bottom, bytes);
#endif
}

}  // namespace

struct Fiber::Context {
  std::byte* stack = nullptr;
  void* fake_stack = nullptr;  // the sanitizer's, while the fiber is left
  const void* caller_bottom = nullptr;
  std::size_t caller_bytes = 0;
#if defined(__x86_64__)
  void* own = nullptr;
  void* caller = nullptr;

  void prepare(Fiber* fiber) {
    auto* top = reinterpret_cast<void**>(stack + kStackBytes);
    top -= 2;  // the stack is aligned to 16 bytes where the function is called
    *--top = reinterpret_cast<void*>(&tradewind_start_fiber);
    *--top = reinterpret_cast<void*>(&run);  // rbp
    *--top = fiber;                          // rbx
    for (int i = 0; i < 4; ++i) *--top = nullptr;
    own = top;
  }
  void enter() { tradewind_switch_stack(&caller, own); }
  void leave() { tradewind_switch_stack(&own, caller); }
#else
  ucontext_t own{};
  ucontext_t caller{};

  void prepare(Fiber* fiber) {
    getcontext(&own);
    own.uc_stack.ss_sp = stack;
    own.uc_stack.ss_size = kStackBytes;
    const auto address = reinterpret_cast<std::uintptr_t>(fiber);
    makecontext(&own, reinterpret_cast<void (*)()>(&entry), 2,
                static_cast<unsigned>(address >> 32U), static_cast<unsigned>(address));
  }
  static void entry(unsigned high, unsigned low) {
    run(reinterpret_cast<Fiber*>((static_cast<std::uintptr_t>(high) << 32U) | low));
  }
  void enter() { swapcontext(&caller, &own); }
  void leave() { swapcontext(&own, &caller); }
#endif
};

Fiber::Fiber(Body body, void* context) : body_(body), argument_(context), context_(new Context) {
  void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) throw std::bad_alloc();
  context_->stack = static_cast<std::byte*>(stack);
  context_->prepare(this);
}

Fiber::~Fiber() {
  munmap(context_->stack, kStackBytes);
  delete context_;
}

void Fiber::enter() {
  void* fake_stack = nullptr;
  begin_switch(&fake_stack, context_->stack, kStackBytes);
  context_->enter();
  end_switch(fake_stack, nullptr, nullptr);
}

void Fiber::leave() {
  begin_switch(&context_->fake_stack, context_->caller_bottom, context_->caller_bytes);
  context_->leave();
  end_switch(context_->fake_stack, &context_->caller_bottom, &context_->caller_bytes);
}

void Fiber::restart() {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(context_->stack, kStackBytes);
#endif
  context_->fake_stack = nullptr;
  has_returned_ = true;
  context_->prepare(this);
}

void Fiber::run(Fiber* self) {
  end_switch(nullptr, &self->context_->caller_bottom, &self->context_->caller_bytes);
  for (;;) {
    self->has_returned_ = false;
    self->body_(self->argument_);
    self->has_returned_ = true;
    self->leave();
  }
}

}  // namespace cuda_emulation
