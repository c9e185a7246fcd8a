// All that nccl.h needs of CUDA, so that it can be read without a toolkit.
#pragma once

typedef struct CUstream_st* cudaStream_t;
