// The CPU kernels. Each call handles a range, so that the caller decides who runs what; the result depends on neither
// the ranges nor the threads.
#pragma once
#include "kernels.h"

namespace prores {

// Partial sums over rows are taken in this many equal chunks (the last may be short), whatever the number of threads.
inline int64_t cpu_chunks(const Shape& shape) { return shape.rows < 64 ? shape.rows : 64; }

struct CpuKernels {
    const char* instruction_set;
    void (*add_forward)(const AddForward&, const Scaling&, const Shape&, int64_t begin_row, int64_t end_row);
    void (*add_backward)(const AddBackward&, const Scaling&, const Shape&, int64_t begin_chunk, int64_t end_chunk);
    void (*norm_forward)(const NormForward&, const Scaling&, const Shape&, int64_t begin_row, int64_t end_row);
    void (*norm_backward)(const NormBackward&, const Scaling&, const Shape&, int64_t begin_chunk, int64_t end_chunk);
    // What the backward kernels left in `partial`, summed into d_bias and d_weight.
    void (*sum_chunks)(const void* partial, void* sum, const Shape&, int64_t begin_column, int64_t end_column);
};

// The best that this CPU runs, or the one asked for last.
const CpuKernels& cpu_kernels();

// "base", "avx2" or "avx512"; false where this CPU or this build has it not. For tests.
bool use_instruction_set(const char* name);

}  // namespace prores
