// The dropout mask: Philox4x32-10 (Salmon et al., 2011), a function of (seed, offset, element) and of nothing else, so
// that the backward pass and recomputation repeat it, and the CPU and every GPU agree, whatever the threads and grids.
//
// Element e takes 16 bits: halfword e % 8 (low half first) of the 128 bits at counter {e / 8, offset}.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define PRORES_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PRORES_HOST_DEVICE inline
#endif

namespace prores {

constexpr uint32_t philox_multiplier_0 = 0xD2511F53, philox_multiplier_1 = 0xCD9E8D57;
constexpr uint32_t philox_weyl_0 = 0x9E3779B9, philox_weyl_1 = 0xBB67AE85;
constexpr int philox_rounds = 10;

PRORES_HOST_DEVICE void philox(uint64_t seed, uint64_t offset, uint64_t counter, uint32_t word[4]) {
    uint32_t key_0 = static_cast<uint32_t>(seed), key_1 = static_cast<uint32_t>(seed >> 32);
    word[0] = static_cast<uint32_t>(counter), word[1] = static_cast<uint32_t>(counter >> 32);
    word[2] = static_cast<uint32_t>(offset), word[3] = static_cast<uint32_t>(offset >> 32);
    for (int round = 0; round < philox_rounds; ++round) {
        const uint64_t product_0 = static_cast<uint64_t>(philox_multiplier_0) * word[0];
        const uint64_t product_1 = static_cast<uint64_t>(philox_multiplier_1) * word[2];
        word[0] = static_cast<uint32_t>(product_1 >> 32) ^ word[1] ^ key_0;
        word[1] = static_cast<uint32_t>(product_1);
        word[2] = static_cast<uint32_t>(product_0 >> 32) ^ word[3] ^ key_1;
        word[3] = static_cast<uint32_t>(product_0);
        key_0 += philox_weyl_0;
        key_1 += philox_weyl_1;
    }
}

}  // namespace prores
