// A thread of the emulated grid: a stack of its own, entered and left by hand. All run on the
// calling thread, one at a time.
#pragma once

#include <cstddef>

namespace cuda_emulation {

class Fiber {
 public:
  using Body = void (*)(void* context);

  // Runs body(context) on each start() until it returns.
  Fiber(Body body, void* context);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Continues the body, or begins it anew where it has returned, until it calls leave() or returns.
  void enter();
  // Back to enter(): called by the body.
  void leave();
  [[nodiscard]] bool has_returned() const { return has_returned_; }
  // Forgets where the body was, for one that will never be entered again where it is.
  void restart();

 private:
  struct Context;
  [[noreturn]] static void run(Fiber* self);

  Body body_;
  void* argument_;
  bool has_returned_ = true;
  Context* context_;
};

}  // namespace cuda_emulation
