// cpu_kernels.inc compiled once per instruction set, and the choice between them at run time: one build for every CPU.
#include "cpu.h"

#include <cstring>

#include "philox.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PRORES_X86
#include <immintrin.h>
#endif

// Results of this size are not found in a cache again. Tests set it lower.
#ifndef PRORES_STREAMED_BYTES
#define PRORES_STREAMED_BYTES (32 << 20)
#endif

// No operation here traps: what is chosen with `?:` may be computed before.
#pragma GCC optimize("O3", "fp-contract=fast", "no-trapping-math")
#define PRORES_INLINE __attribute__((always_inline))  // a loop that calls a function is not vectorised

#define PRORES_INSTRUCTION_SET base
#define PRORES_VECTOR_BYTES 16
#ifdef PRORES_X86
#define PRORES_REGISTER __m128i
#define PRORES_MULTIPLY _mm_mul_epu32
#define PRORES_STREAM _mm_stream_si128
#endif
#include "cpu_kernels.inc"

#ifdef PRORES_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define PRORES_INSTRUCTION_SET avx2
#define PRORES_VECTOR_BYTES 32
#define PRORES_REGISTER __m256i
#define PRORES_MULTIPLY _mm256_mul_epu32
#define PRORES_STREAM _mm256_stream_si256
#include "cpu_kernels.inc"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define PRORES_INSTRUCTION_SET avx512
#define PRORES_VECTOR_BYTES 64
#define PRORES_REGISTER __m512i
#define PRORES_MULTIPLY(a, b) _mm512_maskz_mul_epu32(0xff, a, b)  // the plain one warns in GCC 12
#define PRORES_STREAM _mm512_stream_si512
#include "cpu_kernels.inc"
#pragma GCC pop_options
#endif

namespace prores {
namespace {

struct Candidate {
    const CpuKernels* kernels;
    bool runs_here;
};

const Candidate* candidates(int& count) {
    static const Candidate all[] = {
#ifdef PRORES_X86
        {&avx512::kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
        {&avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
        {&base::kernels, true},
    };
    count = sizeof(all) / sizeof(all[0]);
    return all;
}

const CpuKernels* best() {
    int count;
    const Candidate* candidate = candidates(count);
    while (!candidate->runs_here) ++candidate;
    return candidate->kernels;
}

const CpuKernels* chosen = best();

}  // namespace

const CpuKernels& cpu_kernels() { return *chosen; }

bool use_instruction_set(const char* name) {
    int count;
    const Candidate* all = candidates(count);
    for (int i = 0; i < count; ++i) {
        if (all[i].runs_here && std::strcmp(all[i].kernels->instruction_set, name) == 0) {
            chosen = all[i].kernels;
            return true;
        }
    }
    return false;
}

}  // namespace prores
