# The torch-free, Python-free static core: base, arena, checkpoint, share, step.
# The torch-free, Python-free static core: base, arena, step, share.

add_library(tradewind_warnings INTERFACE)
target_compile_options(tradewind_warnings INTERFACE -Wall -Wextra -Wconversion
  $<$<BOOL:${TRADEWIND_WERROR}>:-Werror>)
# Same bits on every ISA (docs/numbers.md): g++ contracts a*b+c by default once FMA is there.
target_compile_options(tradewind_warnings INTERFACE -ffp-contract=off)
if(TRADEWIND_SANITIZE)
  # -g1 has the lines of a stack trace; variables and types besides double the time to compile.
  target_compile_options(tradewind_warnings INTERFACE -fsanitize=${TRADEWIND_SANITIZE}
    -fno-omit-frame-pointer -g1)
  target_link_options(tradewind_warnings INTERFACE -fsanitize=${TRADEWIND_SANITIZE})
endif()

# One object library per ISA with the kernels of both rooms, each in a namespace of its own.
set(TRADEWIND_KERNEL_FLAGS -O3 -fno-math-errno -fno-trapping-math)
if(TRADEWIND_SANITIZE)
  # Every access is checked where it is written; vectorized, the same checks take six times as long
  # to compile.
  list(APPEND TRADEWIND_KERNEL_FLAGS -O1)
endif()
function(tradewind_add_kernels isa)
  add_library(tradewind_kernels_${isa} OBJECT
    csrc/share/kernels_${isa}.cpp csrc/step/kernels_${isa}.cpp)
  target_include_directories(tradewind_kernels_${isa} PRIVATE csrc)
  target_compile_options(tradewind_kernels_${isa} PRIVATE ${TRADEWIND_KERNEL_FLAGS} ${ARGN})
  target_link_libraries(tradewind_kernels_${isa} PRIVATE tradewind_warnings)
  target_sources(tradewind_core PRIVATE $<TARGET_OBJECTS:tradewind_kernels_${isa}>)
endfunction()

add_library(tradewind_core STATIC
  csrc/arena/gate.cpp
  csrc/arena/layout.cpp
  csrc/arena/memory.cpp
  csrc/base/crc32c.cpp
  csrc/base/cuda/library_file.cpp
  csrc/base/env.cpp
  csrc/base/isa.cpp
  csrc/base/posix_env.cpp
  csrc/base/recording_env.cpp
  csrc/checkpoint/shard_layout.cpp
  csrc/checkpoint/shard_reader.cpp
  csrc/checkpoint/shard_write_job.cpp
  csrc/checkpoint/shard_writer.cpp
  csrc/share/codec.cpp
  csrc/share/comm.cpp
  csrc/share/cuda/library.cpp
  csrc/share/exchange.cpp
  csrc/share/exchange_gather.cpp
  csrc/share/exchange_host.cpp
  csrc/share/exchange_send.cpp
  csrc/share/exchange_sum.cpp
  csrc/share/exchange_watch.cpp
  csrc/share/host_links.cpp
  csrc/share/host_memory.cpp
  csrc/share/hosts.cpp
  csrc/share/isa.cpp
  csrc/share/low_rank.cpp
  csrc/share/nccl_comm.cpp
  csrc/share/nccl_handle.cpp
  csrc/share/nccl_library.cpp
  csrc/share/nccl_memory.cpp
  csrc/share/neighbours.cpp
  csrc/share/plan.cpp
  csrc/share/presence.cpp
  csrc/step/cuda/library.cpp
  csrc/step/isa.cpp
  csrc/step/measure.cpp
  csrc/step/rule_table.cpp
  csrc/step/stored_array.cpp
  csrc/step/sweep.cpp)
target_include_directories(tradewind_core PUBLIC csrc)
target_link_libraries(tradewind_core PUBLIC tradewind_warnings ${CMAKE_DL_LIBS})
tradewind_add_kernels(baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  tradewind_add_kernels(avx2 -mavx2 -mfma -mf16c)
  tradewind_add_kernels(avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c
    -mprefer-vector-width=512)
endif()
