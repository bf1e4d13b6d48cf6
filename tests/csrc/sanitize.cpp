// Runs the CPU kernels, on buffers of exactly the size that they need, for a build under sanitizers. Every call is made
// twice, for all rows at once and row by row, with results that must not differ in a bit.
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu.h"

using namespace prores;

namespace {

size_t width_of(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

uint64_t random_state;

uint64_t next_random() { return random_state = random_state * 6364136223846793005u + 1442695040888963407u; }

// Ends where its allocation ends. `shift` elements before it spoil the alignment, as a slice of a tensor does.
class Buffer {
  public:
    Buffer(int64_t count, Dtype dtype, int shift)
        : bytes_(count * width_of(dtype)), skipped_(shift * width_of(dtype)),
          memory_(std::make_unique<unsigned char[]>(skipped_ + bytes_)), width_(width_of(dtype)) {}

    void* data() { return memory_.get() + skipped_; }
    void fill(unsigned char byte) { std::memset(data(), byte, bytes_); }

    // Random numbers of less than 2, in every one of the types: only the exponent's upper bit is not random.
    Buffer& randomize() {
        unsigned char* bytes = static_cast<unsigned char*>(data());
        for (size_t i = 0; i < bytes_; ++i) bytes[i] = next_random() >> 56;
        for (size_t i = width_ - 1; i < bytes_; i += width_) bytes[i] &= 0xbf;
        return *this;
    }

    bool operator==(const Buffer& other) const {
        return std::memcmp(memory_.get() + skipped_, other.memory_.get() + skipped_, bytes_) == 0;
    }

  private:
    size_t bytes_, skipped_;
    std::unique_ptr<unsigned char[]> memory_;
    size_t width_;
};

struct Case {
    Shape shape;
    bool with_bias, with_dropout, with_residual;
    int shift;
};

// All results of all kernels; `step` rows, chunks or columns at a time, 0 for all at once.
std::vector<Buffer> run(const CpuKernels& kernels, const Case& c, int64_t step) {
    const auto [shape, with_bias, with_dropout, with_residual, shift] = c;
    const int64_t rows = shape.rows, hidden = shape.hidden, numel = rows * hidden, chunks = cpu_chunks(shape);
    const Dtype x = shape.x, stream = shape.stream;
    const Dtype sums = stream == Dtype::float64 ? Dtype::float64 : Dtype::float32;
    const auto each = [step](int64_t end, auto&& call) {
        for (int64_t begin = 0; begin < end; begin += step ? step : end)
            call(begin, step && begin + step < end ? begin + step : end);
    };

    random_state = 1;
    const auto input = [shift](int64_t count, Dtype dtype) {
        return std::move(Buffer(count, dtype, shift).randomize());
    };
    Buffer branch = input(numel, x), residual = input(numel, stream);
    Buffer bias = input(hidden, x), weight = input(hidden, x);
    Buffer grad = input(numel, stream), grad_normed = input(numel, x);
    const auto alpha = std::make_unique<float>(1.0f / 3);
    const auto rng = std::make_unique<int64_t[]>(2);
    rng[0] = -123456789012345, rng[1] = 987654321098765;
    const Scaling scaling = {alpha.get(), with_dropout ? rng.get() : nullptr, 19661, 65536.0 / (65536 - 19661), 1.7};

    std::vector<Buffer> results;
    results.reserve(16);  // pointers into them must last
    const auto output = [&](int64_t count, Dtype dtype) {
        results.emplace_back(count, dtype, shift);
        results.back().fill(step ? 0x55 : 0xaa);  // what a kernel leaves out differs
        return results.back().data();
    };
    const void* const maybe_bias = with_bias ? bias.data() : nullptr;

    const AddForward add = {branch.data(), residual.data(), maybe_bias, output(numel, stream)};
    each(rows, [&](int64_t begin, int64_t end) { kernels.add_forward(add, scaling, shape, begin, end); });

    const AddForward add_of_norm = {branch.data(), residual.data(), maybe_bias, output(numel, stream)};
    const NormForward norm = {add_of_norm, weight.data(), output(numel, x), output(rows, sums), 1e-5};
    each(rows, [&](int64_t begin, int64_t end) { kernels.norm_forward(norm, scaling, shape, begin, end); });

    const auto sum = [&](const void* partial, void* total) {
        each(hidden, [&](int64_t begin, int64_t end) { kernels.sum_chunks(partial, total, shape, begin, end); });
    };
    const AddBackward add_back = {grad.data(), output(numel, x), with_residual ? output(numel, stream) : nullptr,
                                  with_bias ? output(hidden, x) : nullptr,
                                  with_bias ? output(chunks * hidden, sums) : nullptr};
    each(chunks, [&](int64_t begin, int64_t end) { kernels.add_backward(add_back, scaling, shape, begin, end); });
    if (with_bias) sum(add_back.partial, add_back.d_bias);

    const NormBackward norm_back = {grad.data(), grad_normed.data(), add_of_norm.out, norm.rstd, weight.data(),
                                    output(numel, x), output(numel, stream), with_bias ? output(hidden, x) : nullptr,
                                    output(hidden, x), output((with_bias ? 2 : 1) * chunks * hidden, sums)};
    each(chunks, [&](int64_t begin, int64_t end) { kernels.norm_backward(norm_back, scaling, shape, begin, end); });
    sum(norm_back.partial, norm_back.d_weight);
    if (with_bias) sum(static_cast<char*>(norm_back.partial) + chunks * hidden * width_of(sums), norm_back.d_bias);
    return results;
}

}  // namespace

int main() {
    constexpr Dtype types[][2] = {
        {Dtype::float32, Dtype::float32},   {Dtype::bfloat16, Dtype::bfloat16}, {Dtype::float16, Dtype::float16},
        {Dtype::float64, Dtype::float64},   {Dtype::bfloat16, Dtype::float32},  {Dtype::float16, Dtype::float32},
    };
    constexpr int64_t sizes[][2] = {{205, 123}, {7, 33},   {1, 3},    {4, 1},   {0, 4},  {64, 5},
                                    {65, 8},    {2, 1023}, {2, 1024}, {3, 1025}, {1, 2049}};
    for (const char* name : {"base", "avx2", "avx512"}) {
        if (!use_instruction_set(name)) continue;
        int cases = 0;
        for (const auto& [x, stream] : types)
            for (const auto& [rows, hidden] : sizes)
                for (int bits = 0; bits < 16; ++bits, ++cases) {
                    const Shape shape = {rows, hidden, x, stream};
                    const Case c = {shape, bool(bits & 1), bool(bits & 2), bool(bits & 4), bits >> 3};
                    if (run(cpu_kernels(), c, 0) == run(cpu_kernels(), c, 1)) continue;
                    std::printf("%s: the ranges matter: types %d and %d, %ld x %ld, case %d\n", name, int(x),
                                int(stream), long(rows), long(hidden), bits);
                    return 1;
                }
        std::printf("%s: %d cases\n", name, cases);
    }
}
