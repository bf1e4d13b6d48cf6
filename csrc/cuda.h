// Launchers of the CUDA kernels. No CUDA header is needed to include this one: a stream is a cudaStream_t as void*, a
// result is a cudaError_t as int, 0 for success. They launch on the given stream and the current device, allocate
// nothing and wait for nothing, so that a CUDA graph can capture them.
#pragma once
#include <cstdint>

#include "kernels.h"

extern "C" {

// The chunks of rows whose partial sums a backward's `partial` holds. Of the shape only: sums are the same on every GPU.
int64_t prores_cuda_chunks(const prores::Shape* shape);

int prores_cuda_add_forward(const prores::AddForward*, const prores::Scaling*, const prores::Shape*, void* stream);
int prores_cuda_add_backward(const prores::AddBackward*, const prores::Scaling*, const prores::Shape*, void* stream);
int prores_cuda_norm_forward(const prores::NormForward*, const prores::Scaling*, const prores::Shape*, void* stream);
int prores_cuda_norm_backward(const prores::NormBackward*, const prores::Scaling*, const prores::Shape*, void* stream);

const char* prores_cuda_error(int result);

}  // extern "C"
