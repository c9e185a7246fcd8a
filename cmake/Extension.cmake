# The extension module, against the torch that is installed in this Python.

find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
# find_spec does not run torch/__init__.py: fast, and works where torch itself would not load.
execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/find_torch.py
  OUTPUT_VARIABLE TRADEWIND_TORCH RESULT_VARIABLE TRADEWIND_TORCH_RESULT
  ERROR_VARIABLE TRADEWIND_TORCH_ERROR OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT TRADEWIND_TORCH_RESULT EQUAL 0)
  message(FATAL_ERROR "${TRADEWIND_TORCH_ERROR}")
endif()
list(GET TRADEWIND_TORCH 0 TRADEWIND_TORCH_ROOT)
list(GET TRADEWIND_TORCH 1 TRADEWIND_TORCH_VERSION)
message(STATUS "torch ${TRADEWIND_TORCH_VERSION} in ${TRADEWIND_TORCH_ROOT}")

add_library(tradewind_libtorch INTERFACE)
target_include_directories(tradewind_libtorch SYSTEM INTERFACE
  ${TRADEWIND_TORCH_ROOT}/include ${TRADEWIND_TORCH_ROOT}/include/torch/csrc/api/include
  ${Python_INCLUDE_DIRS})
target_compile_definitions(tradewind_libtorch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO
  TORCH_ASSERT_ONLY_METHOD_OPERATORS)
target_link_directories(tradewind_libtorch INTERFACE ${TRADEWIND_TORCH_ROOT}/lib)
target_link_libraries(tradewind_libtorch INTERFACE torch_python torch_cpu c10)

# The one unit that sees OpenMP, linked with the runtime that torch ships: two runtimes in a process
# would fight over the cores.
add_library(tradewind_parallel OBJECT csrc/torch/parallel.cpp)
target_compile_options(tradewind_parallel PRIVATE -fopenmp)
target_link_libraries(tradewind_parallel PRIVATE tradewind_core tradewind_libtorch)
file(GLOB TRADEWIND_TORCH_OPENMP ${TRADEWIND_TORCH_ROOT}/lib/libgomp*.so*
  ${TRADEWIND_TORCH_ROOT}.libs/libgomp*.so*)

add_library(tradewind_torch STATIC
  csrc/torch/backward_update.cpp
  csrc/torch/bucket_arithmetic.cpp
  csrc/torch/c10d_comm.cpp
  csrc/torch/c10d_peers.cpp
  csrc/torch/collective_gradients.cpp
  csrc/torch/collective_gradients_backward.cpp
  csrc/torch/collective_gradients_round.cpp
  csrc/torch/gradient_arena.cpp
  csrc/torch/gradient_hooks.cpp
  csrc/torch/gradient_rounds.cpp
  csrc/torch/device_backward_update.cpp
  csrc/torch/device_image.cpp
  csrc/torch/device_table.cpp
  csrc/torch/group_state.cpp
  csrc/torch/hot_measure.cpp
  csrc/torch/mean_measures.cpp
  csrc/torch/optimizer_parameters.cpp
  csrc/torch/optimizer_table.cpp
  csrc/torch/orthogonalize.cpp
  csrc/torch/parameter_arena.cpp
  csrc/torch/parameter_checks.cpp
  csrc/torch/pinned_pool.cpp
  csrc/torch/round_facts.cpp
  csrc/torch/shared_gradients.cpp
  csrc/torch/shared_gradients_round.cpp
  csrc/torch/shared_gradients_shards.cpp
  csrc/torch/shared_gradients_thin.cpp
  csrc/torch/slot_tensor.cpp
  csrc/torch/step_reading.cpp
  csrc/torch/weight_comparison.cpp
  csrc/torch/wire.cpp
  csrc/torch/zeroed_memory.cpp
  $<TARGET_OBJECTS:tradewind_parallel>)
target_link_libraries(tradewind_torch PUBLIC tradewind_core tradewind_libtorch)
# torch's own headers trip -Wconversion inside inline functions that our units instantiate.
target_compile_options(tradewind_torch PRIVATE -Wno-conversion)

Python_add_library(_native MODULE WITH_SOABI
  csrc/bindings/module.cpp
  csrc/bindings/arena.cpp
  csrc/bindings/checkpoint.cpp
  csrc/bindings/collective.cpp
  csrc/bindings/cuda.cpp
  csrc/bindings/env.cpp
  csrc/bindings/exceptions.cpp
  csrc/bindings/optimizer.cpp
  csrc/bindings/share.cpp
  csrc/bindings/step.cpp)
target_compile_options(_native PRIVATE -Wno-conversion)
target_link_libraries(_native PRIVATE tradewind_torch ${TRADEWIND_TORCH_OPENMP})
# torch is not in the wheel; its libraries stand beside this package in site-packages.
set_target_properties(_native PROPERTIES INSTALL_RPATH "$ORIGIN/../torch/lib"
  BUILD_WITH_INSTALL_RPATH ON)

file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/_build_info.py @ONLY CONTENT
"\"\"\"What this build was made against. Written by the build.\"\"\"

TORCH_VERSION: str = \"@TRADEWIND_TORCH_VERSION@\"
CUDA: bool = @TRADEWIND_CUDA_PYTHON@
")
install(TARGETS _native LIBRARY DESTINATION tradewind)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_build_info.py DESTINATION tradewind)
