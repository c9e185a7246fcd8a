# libtradewind_cuda: the CUDA kernels behind a C interface, built wherever nvcc is found. Static
# runtime, so it loads without CUDA installed; it is opened only where a GPU answers.

set(TRADEWIND_CUDA_PYTHON False)
if(TRADEWIND_CUDA STREQUAL "OFF")
  return()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(TRADEWIND_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TRADEWIND_CUDA=ON: nvcc was not found; put it on the PATH or set CUDACXX")
  endif()
  message(STATUS "CUDA: nvcc not found, building without the CUDA library")
  return()
endif()
# Machine code for A100, H100/H200 and B200, and PTX of the newest for what comes after.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "CUDA Toolkit 12.8 or newer is needed, found ${CMAKE_CUDA_COMPILER_VERSION}; "
    "upgrade it or configure with -DTRADEWIND_CUDA=OFF")
endif()
set(TRADEWIND_CUDA_PYTHON True)
add_library(tradewind_cuda SHARED
  csrc/share/cuda/codec.cu
  csrc/share/cuda/sum.cu
  csrc/step/cuda/combine.cu
  csrc/step/cuda/control.cu
  csrc/step/cuda/measure.cu
  csrc/step/cuda/probe.cu
  csrc/step/cuda/sweep_double.cu
  csrc/step/cuda/sweep_float.cu)
target_include_directories(tradewind_cuda PRIVATE csrc)
# Same bits as on the CPU: no contraction, subnormals kept, IEEE division and root.
target_compile_options(tradewind_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false --ftz=false --prec-div=true --prec-sqrt=true>)
set_target_properties(tradewind_cuda PROPERTIES
  CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Static
  CUDA_VISIBILITY_PRESET default)
if(TRADEWIND_BUILD_EXTENSION)
  install(TARGETS tradewind_cuda LIBRARY DESTINATION tradewind)
endif()
