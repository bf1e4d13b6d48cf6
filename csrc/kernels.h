// What a kernel gets: plain pointers and sizes. No torch here, so that kernels compile in seconds, with any compiler,
// under sanitizers, and for GPUs that the build machine does not have.
//
// Shapes: [rows, hidden], contiguous, row-major. Types: X is the branch's type (x, bias, weight, normed and their
// gradients), S the residual stream's (residual, out, their gradients). S is X, or float32 for a half-precision X.
// Sums are taken in float32 (float64 where S is float64) and rounded once.
#pragma once
#include <cstdint>

namespace prores {

enum class Dtype : int32_t { float32, bfloat16, float16, float64 };

// The scalars of one call. alpha and rng are read by the kernel, where they live: on the device.
struct Scaling {
    const float* alpha;
    const int64_t* rng;      // {seed, offset}; null: no dropout
    uint32_t threshold;      // an element is dropped where its 16 random bits are below; 65536 drops all
    double keep_scale;       // 65536 / (65536 - threshold)
    double residual_scale;
};

struct Shape {
    int64_t rows, hidden;
    Dtype x, stream;
};

// out = residual_scale * residual + alpha * dropout(x + bias)
struct AddForward {
    const void* x;         // X
    const void* residual;  // S
    const void* bias;      // X [hidden]; null: none
    void* out;             // S
};

// d_x = alpha * dropout(grad), d_bias = sum of d_x over rows, d_residual = residual_scale * grad
struct AddBackward {
    const void* grad;  // S
    void* d_x;         // X
    void* d_residual;  // S; null: not wanted (residual_scale is 1: the caller passes grad on)
    void* d_bias;      // X [hidden]; null: none
    void* partial;     // accumulator type [chunks, hidden]; null where d_bias is
};

// stream = out of the add, normed = stream * rstd * weight, rstd = 1 / sqrt(mean(stream^2) + eps)
struct NormForward {
    AddForward add;
    const void* weight;  // X [hidden]
    void* normed;        // X
    void* rstd;          // accumulator type [rows]
    double eps;
};

// With n = stream * rstd and h = grad_normed * weight, d_stream = grad_stream + rstd * (h - n * mean(h * n));
// d_weight = sum of grad_normed * n over rows. From d_stream on as in AddBackward.
struct NormBackward {
    const void* grad_stream;  // S
    const void* grad_normed;  // X
    const void* stream;       // S
    const void* rstd;         // accumulator type [rows]
    const void* weight;       // X [hidden]
    void* d_x;                // X
    void* d_residual;         // S, always written
    void* d_bias;             // X [hidden]; null: none
    void* d_weight;           // X [hidden]
    void* partial;            // accumulator type [chunks, hidden], twice where d_bias is wanted: weight's, then bias's
};

}  // namespace prores
