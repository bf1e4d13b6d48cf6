// The kernels for CUDA. Memory is what bounds them, so they go over it once where they can, in accesses of 16 bytes.
//
// A thread takes `width` consecutive columns of a row: what one Philox call serves, and 16 bytes of a half-precision
// type (wider types take several accesses). Where hidden is no multiple of it, or a pointer is not aligned to 16 bytes,
// the same kernels run with vector = false: element by element, and only `count` of them at the end of a row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <initializer_list>
#include <type_traits>

#include "cuda.h"
#include "philox.h"

namespace prores {
namespace {

constexpr int width = 8;
constexpr int warp_size = 32;
constexpr int add_rows = 4;    // rows of a thread of the add, where it need not keep partial sums few
constexpr int norm_group = 4;  // rows that a block of norm_backward works on at once
constexpr int add_threads = 256, norm_threads = 512, sum_threads = 1024;

// Blocks that share a multiprocessor's registers: two leave 64 to a thread, which float64 and scalar code exceed.
template <class S, bool vector>
constexpr int norm_blocks = vector && !std::is_same_v<S, double> ? 2 : 1;

template <class S>
using Accumulator = std::conditional_t<std::is_same_v<S, double>, double, float>;

template <class T>
struct alignas(16) Pack {
    T at[width];
};

template <class T>
constexpr int accesses = sizeof(Pack<T>) / sizeof(uint4);

template <class T>
__device__ Pack<T> filled(T value) {
    Pack<T> pack;
    for (T& element : pack.at) element = value;
    return pack;
}

// constant: no thread writes there while the kernel runs, so that the load may overtake stores.
template <class T, bool vector, bool constant = true>
__device__ Pack<T> load(const void* tensor, int64_t first, int64_t count) {
    const T* from = static_cast<const T*>(tensor) + first;
    Pack<T> pack;
    if constexpr (vector) {
        const uint4* source = reinterpret_cast<const uint4*>(from);
        for (int i = 0; i < accesses<T>; ++i) {
            reinterpret_cast<uint4*>(&pack)[i] = constant ? __ldg(source + i) : source[i];
        }
    } else {
        for (int i = 0; i < width; ++i) pack.at[i] = i < count ? from[i] : T(0.0f);
    }
    return pack;
}

template <bool vector, class T>
__device__ void store(void* tensor, int64_t first, int64_t count, const Pack<T>& pack) {
    T* to = static_cast<T*>(tensor) + first;
    if constexpr (vector) {
        for (int i = 0; i < accesses<T>; ++i) {
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(&pack)[i];
        }
    } else {
        for (int i = 0; i < width; ++i) {
            if (i < count) to[i] = pack.at[i];
        }
    }
}

// What a Scaling points to, read on the device.
template <class Acc>
struct Scales {
    Acc alpha, residual, keep;
    bool dropout;
    uint32_t threshold;
    uint64_t seed = 0, offset = 0;

    __device__ explicit Scales(const Scaling& scaling)
        : alpha(*scaling.alpha), residual(static_cast<Acc>(scaling.residual_scale)),
          keep(static_cast<Acc>(scaling.keep_scale)), dropout(scaling.rng != nullptr), threshold(scaling.threshold) {
        if (dropout) seed = scaling.rng[0], offset = scaling.rng[1];
    }

    // Bit i: element i of the eight that share this counter is kept.
    __device__ uint32_t kept(uint64_t counter) const {
        uint32_t word[4], bits = 0;
        philox(seed, offset, counter, word);
        for (int i = 0; i < width; ++i) bits |= uint32_t((word[i / 2] >> 16 * (i % 2) & 0xffff) >= threshold) << i;
        return bits;
    }

    // For elements [first, first + width), which may take their bits from two counters where rows are not aligned.
    template <bool vector>
    __device__ void drop(Pack<Acc>& value, uint64_t first) const {
        if (!dropout) return;
        uint32_t bits = kept(first / width);
        if (!vector && first % width) bits = (bits | kept(first / width + 1) << width) >> first % width;
        for (int i = 0; i < width; ++i) value.at[i] = bits >> i & 1 ? keep * value.at[i] : Acc(0);
    }
};

// Without a bias: -0, which changes no x that it is added to, not even -0.
template <class X, bool vector>
__device__ Pack<X> load_bias(const void* bias, int64_t column, int64_t count) {
    return bias ? load<X, vector>(bias, column, count) : filled(X(-0.0f));
}

template <bool vector, class X, class S, class Acc>
__device__ Pack<S> scaled_add(const Pack<X>& x, const Pack<X>& bias, const Pack<S>& residual,
                              const Scales<Acc>& scales, int64_t first) {
    Pack<Acc> branch;
    for (int i = 0; i < width; ++i) branch.at[i] = Acc(x.at[i]) + Acc(bias.at[i]);
    scales.template drop<vector>(branch, first);
    Pack<S> out;
    for (int i = 0; i < width; ++i) {  // fma by name: both kernels that add round alike
        out.at[i] = S(fma(scales.alpha, branch.at[i], scales.residual * Acc(residual.at[i])));
    }
    return out;
}

// From the gradient of the add's output: d_x and d_residual, and d_x onto the sum that is d_bias.
template <class X, class S, bool vector, class Acc>
__device__ void add_gradients(Pack<Acc> grad, void* d_x, void* d_residual, Pack<Acc>& d_bias, const Scales<Acc>& scales,
                              int64_t first, int64_t count) {
    if (d_residual) {
        Pack<S> scaled;
        for (int i = 0; i < width; ++i) scaled.at[i] = S(scales.residual * grad.at[i]);
        store<vector>(d_residual, first, count, scaled);
    }
    scales.template drop<vector>(grad, first);
    Pack<X> scaled;
    for (int i = 0; i < width; ++i) {
        const Acc value = scales.alpha * grad.at[i];
        scaled.at[i] = X(value);
        d_bias.at[i] += value;
    }
    store<vector>(d_x, first, count, scaled);
}

// Where a thread of the add works: in the same columns, down the rows of one chunk.
struct Place {
    int64_t chunk, begin, end, column, count;

    __device__ Place(const Shape& shape, int64_t chunk_rows)
        : chunk(int64_t(blockIdx.x) * blockDim.y + threadIdx.y), begin(chunk * chunk_rows),
          end(min(begin + chunk_rows, shape.rows)),
          column((int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * width), count(shape.hidden - column) {}

    __device__ bool empty() const { return begin >= end || count <= 0; }
};

template <class X, class S, bool vector>
__global__ void __launch_bounds__(add_threads)
add_forward(const AddForward add, const Scaling scaling, const Shape shape, int64_t chunk_rows) {
    const Place place(shape, chunk_rows);
    if (place.empty()) return;
    const Scales<Accumulator<S>> scales(scaling);
    const auto bias = load_bias<X, vector>(add.bias, place.column, place.count);
#pragma unroll 1
    for (int64_t row = place.begin; row < place.end; ++row) {
        const int64_t at = row * shape.hidden + place.column;
        const auto x = load<X, vector>(add.x, at, place.count);
        const auto residual = load<S, vector>(add.residual, at, place.count);
        store<vector>(add.out, at, place.count, scaled_add<vector>(x, bias, residual, scales, at));
    }
}

template <class X, class S, bool vector>
__global__ void __launch_bounds__(add_threads)
add_backward(const AddBackward add, const Scaling scaling, const Shape shape, int64_t chunk_rows) {
    using Acc = Accumulator<S>;
    const Place place(shape, chunk_rows);
    if (place.empty()) return;
    const Scales<Acc> scales(scaling);
    Pack<Acc> d_bias = filled(Acc(0));
#pragma unroll 1
    for (int64_t row = place.begin; row < place.end; ++row) {
        const int64_t at = row * shape.hidden + place.column;
        const auto narrow = load<S, vector>(add.grad, at, place.count);
        Pack<Acc> grad;
        for (int i = 0; i < width; ++i) grad.at[i] = Acc(narrow.at[i]);
        add_gradients<X, S, vector>(grad, add.d_x, add.d_residual, d_bias, scales, at, place.count);
    }
    if (add.d_bias) store<vector>(add.partial, place.chunk * shape.hidden + place.column, place.count, d_bias);
}

// The block's sums, in shared memory, until the next call. Their order depends on the block's size only.
template <int n, class Acc>
__device__ const Acc* block_sum(const Acc (&value)[n]) {
    __shared__ Acc of_warp[n][warp_size], of_block[n];
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size, warps = blockDim.x / warp_size;
    const auto warp_sum = [](Acc sum) {
        for (int mask = warp_size / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
        return sum;
    };
    for (int i = 0; i < n; ++i) {
        const Acc sum = warp_sum(value[i]);
        if (lane == 0) of_warp[i][warp] = sum;
    }
    __syncthreads();
    for (int i = warp; i < n; i += warps) {
        const Acc sum = warp_sum(lane < warps ? of_warp[i][lane] : Acc(0));
        if (lane == 0) of_block[i] = sum;
    }
    __syncthreads();
    return of_block;
}

// A block takes a row at a time.
template <class X, class S, bool vector>
__global__ void __launch_bounds__(norm_threads, norm_blocks<S, vector>)
norm_forward(const NormForward norm, const Scaling scaling, const Shape shape) {
    using Acc = Accumulator<S>;
    const Scales<Acc> scales(scaling);
    const int64_t begin = threadIdx.x * width, stride = blockDim.x * width;
    for (int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
        Pack<S> stream;
        Acc squares[1] = {};
        for (int64_t column = begin; column < shape.hidden; column += stride) {
            const int64_t at = row * shape.hidden + column, count = shape.hidden - column;
            const auto x = load<X, vector>(norm.add.x, at, count);
            const auto residual = load<S, vector>(norm.add.residual, at, count);
            stream = scaled_add<vector>(x, load_bias<X, vector>(norm.add.bias, column, count), residual, scales, at);
            store<vector>(norm.add.out, at, count, stream);
            for (int i = 0; i < width; ++i) {
                if (vector || i < count) squares[0] += Acc(stream.at[i]) * Acc(stream.at[i]);
            }
        }
        const Acc rstd = 1 / sqrt(*block_sum(squares) / Acc(shape.hidden) + Acc(norm.eps));
        if (threadIdx.x == 0) static_cast<Acc*>(norm.rstd)[row] = rstd;
        for (int64_t column = begin; column < shape.hidden; column += stride) {
            const int64_t at = row * shape.hidden + column, count = shape.hidden - column;
            if (stride < shape.hidden) stream = load<S, vector, false>(norm.add.out, at, count);  // else: still here
            const auto weight = load<X, vector>(norm.weight, column, count);
            Pack<X> normed;
            for (int i = 0; i < width; ++i) normed.at[i] = X(Acc(stream.at[i]) * rstd * Acc(weight.at[i]));
            store<vector>(norm.normed, at, count, normed);
        }
    }
}

// A block takes the rows of one chunk, a group at a time: first the mean of each row, then, with the group's rows in
// the cache, their gradients. The sums over rows grow in `partial`, where every column belongs to one thread: a row of
// any size fits, and a group touches them once.
template <class X, class S, bool vector>
__global__ void __launch_bounds__(norm_threads, norm_blocks<S, vector>)
norm_backward(const NormBackward norm, const Scaling scaling, const Shape shape, int64_t chunk_rows) {
    using Acc = Accumulator<S>;
    const Scales<Acc> scales(scaling);
    const Acc per_column = 1 / Acc(shape.hidden);
    const int64_t begin = threadIdx.x * width, stride = blockDim.x * width;
    const int64_t first_row = blockIdx.x * chunk_rows, end_row = min(first_row + chunk_rows, shape.rows);
    for (int64_t row = first_row; row < end_row; row += norm_group) {
        Acc products[norm_group] = {};
        for (int64_t column = begin; column < shape.hidden; column += stride) {
            const int64_t count = shape.hidden - column;
            const auto weight = load<X, vector>(norm.weight, column, count);
#pragma unroll
            for (int k = 0; k < norm_group; ++k) {
                if (row + k >= end_row) break;
                const int64_t at = (row + k) * shape.hidden + column;
                const auto grad = load<X, vector>(norm.grad_normed, at, count);
                const auto stream = load<S, vector>(norm.stream, at, count);
                for (int i = 0; i < width; ++i) products[k] += Acc(grad.at[i]) * Acc(weight.at[i]) * Acc(stream.at[i]);
            }
        }
        const Acc* product = block_sum(products);
        for (int64_t column = begin; column < shape.hidden; column += stride) {
            const int64_t count = shape.hidden - column;
            const int64_t sum_at = blockIdx.x * shape.hidden + column, bias_at = gridDim.x * shape.hidden + sum_at;
            const auto weight = load<X, vector>(norm.weight, column, count);
            Pack<Acc> d_weight = filled(Acc(0)), d_bias = d_weight;
            if (row != first_row) {
                d_weight = load<Acc, vector, false>(norm.partial, sum_at, count);
                if (norm.d_bias) d_bias = load<Acc, vector, false>(norm.partial, bias_at, count);
            }
#pragma unroll 1
            for (int k = 0; k < norm_group; ++k) {
                if (row + k >= end_row) break;
                const int64_t at = (row + k) * shape.hidden + column;
                const Acc rstd = static_cast<const Acc*>(norm.rstd)[row + k];
                const Acc mean = product[k] * rstd * per_column;
                const auto grad_normed = load<X, vector>(norm.grad_normed, at, count);
                const auto stream = load<S, vector>(norm.stream, at, count);
                const auto grad_stream = load<S, vector>(norm.grad_stream, at, count);
                Pack<Acc> grad;
                for (int i = 0; i < width; ++i) {
                    const Acc n = Acc(stream.at[i]) * rstd, g = Acc(grad_normed.at[i]);
                    grad.at[i] = Acc(grad_stream.at[i]) + rstd * (g * Acc(weight.at[i]) - n * mean);
                    d_weight.at[i] += g * n;
                }
                add_gradients<X, S, vector>(grad, norm.d_x, norm.d_residual, d_bias, scales, at, count);
            }
            store<vector>(norm.partial, sum_at, count, d_weight);
            if (norm.d_bias) store<vector>(norm.partial, bias_at, count, d_bias);
        }
    }
}

// The second pass of the sums over rows: block y sums partial y, each warp every 32nd chunk of 32 columns.
template <class X, class Acc>
__global__ void __launch_bounds__(sum_threads)
sum_chunks(const Acc* partial, X* first, X* second, int64_t chunks, int64_t hidden) {
    __shared__ Acc sums[sum_threads / warp_size][warp_size];
    const int64_t column = int64_t(blockIdx.x) * warp_size + threadIdx.x;
    partial += blockIdx.y * chunks * hidden + column;
    Acc sum = 0;
    if (column < hidden) {
#pragma unroll 4
        for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += blockDim.y) sum += partial[chunk * hidden];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= hidden) return;
    for (int k = 1; k < blockDim.y; ++k) sum += sums[k][threadIdx.x];
    (blockIdx.y ? second : first)[column] = X(sum);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t packs(const Shape& shape) { return std::max<int64_t>(ceil_div(shape.hidden, width), 1); }

// Enough chunks to fill the GPUs of today, few enough for their sums to take little time and memory; whole groups.
int64_t chunk_rows(const Shape& shape) {
    const int64_t chunks = std::clamp<int64_t>((1 << 17) / packs(shape), 256, 1024);
    return ceil_div(std::max<int64_t>(shape.rows, 1), chunks * norm_group) * norm_group;
}

// Threads for one row: whole warps, at most `most`, that come around to it equally often.
int row_threads(const Shape& shape, int most) {
    const int64_t rounds = ceil_div(packs(shape), most);
    return ceil_div(ceil_div(packs(shape), rounds), warp_size) * warp_size;
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, void* stream, const Arguments&... arguments) {
    if (grid.x == 0) return cudaSuccess;  // no rows
    kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
    return cudaGetLastError();
}

template <class... Parameters, class Tensors>
int launch_add(void (*kernel)(Parameters...), const Tensors& add, const Scaling& scaling, const Shape& shape,
               int64_t chunk_rows, void* stream) {
    const dim3 block(row_threads(shape, add_threads), add_threads / row_threads(shape, add_threads));
    const dim3 grid(ceil_div(ceil_div(shape.rows, chunk_rows), block.y), ceil_div(packs(shape), block.x));
    return launch(kernel, grid, block, stream, add, scaling, shape, chunk_rows);
}

// Zeros where there are no rows.
template <class X, class S>
int launch_sum(const void* partial, void* first, void* second, const Shape& shape, void* stream) {
    using Acc = Accumulator<S>;
    const dim3 grid(ceil_div(shape.hidden, warp_size), second ? 2 : 1), block(warp_size, sum_threads / warp_size);
    return launch(sum_chunks<X, Acc>, grid, block, stream, static_cast<const Acc*>(partial), static_cast<X*>(first),
                  static_cast<X*>(second), prores_cuda_chunks(&shape), shape.hidden);
}

// call(X(), S(), std::bool_constant<vector>()), as the types and the pointers want it. Null counts as aligned.
template <class Call>
int dispatch(const Shape& shape, std::initializer_list<const void*> pointers, Call call) {
    if (shape.hidden == 0) return cudaSuccess;
    const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(uint4) == 0; };
    const bool vector = shape.hidden % width == 0 && std::all_of(pointers.begin(), pointers.end(), aligned);
    const auto with = [&](auto x, auto s) {
        return vector ? call(x, s, std::true_type()) : call(x, s, std::false_type());
    };
    const auto is = [&](Dtype x, Dtype stream) { return shape.x == x && shape.stream == stream; };
    if (is(Dtype::float32, Dtype::float32)) return with(float(), float());
    if (is(Dtype::float64, Dtype::float64)) return with(double(), double());
    if (is(Dtype::bfloat16, Dtype::bfloat16)) return with(__nv_bfloat16(), __nv_bfloat16());
    if (is(Dtype::bfloat16, Dtype::float32)) return with(__nv_bfloat16(), float());
    if (is(Dtype::float16, Dtype::float16)) return with(__half(), __half());
    if (is(Dtype::float16, Dtype::float32)) return with(__half(), float());
    return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace prores

using namespace prores;

int64_t prores_cuda_chunks(const Shape* shape) { return ceil_div(shape->rows, chunk_rows(*shape)); }

const char* prores_cuda_error(int result) { return cudaGetErrorString(static_cast<cudaError_t>(result)); }

int prores_cuda_add_forward(const AddForward* add, const Scaling* scaling, const Shape* shape, void* stream) {
    return dispatch(*shape, {add->x, add->residual, add->bias, add->out}, [&](auto x, auto s, auto vector) {
        const auto kernel = add_forward<decltype(x), decltype(s), vector>;
        return launch_add(kernel, *add, *scaling, *shape, add_rows, stream);
    });
}

int prores_cuda_add_backward(const AddBackward* add, const Scaling* scaling, const Shape* shape, void* stream) {
    return dispatch(*shape, {add->grad, add->d_x, add->d_residual, add->partial}, [&](auto x, auto s, auto vector) {
        using X = decltype(x);
        using S = decltype(s);
        const int64_t rows = add->d_bias ? chunk_rows(*shape) : add_rows;
        const int result = launch_add(add_backward<X, S, vector>, *add, *scaling, *shape, rows, stream);
        if (result != cudaSuccess || !add->d_bias) return result;
        return launch_sum<X, S>(add->partial, add->d_bias, nullptr, *shape, stream);
    });
}

int prores_cuda_norm_forward(const NormForward* norm, const Scaling* scaling, const Shape* shape, void* stream) {
    const AddForward& add = norm->add;
    const std::initializer_list<const void*> pointers = {add.x,   add.residual, add.bias,
                                                         add.out, norm->weight, norm->normed};
    return dispatch(*shape, pointers, [&](auto x, auto s, auto vector) {
        const auto kernel = norm_forward<decltype(x), decltype(s), vector>;
        const dim3 grid(std::min<int64_t>(shape->rows, INT_MAX));
        return launch(kernel, grid, row_threads(*shape, norm_threads), stream, *norm, *scaling, *shape);
    });
}

int prores_cuda_norm_backward(const NormBackward* norm, const Scaling* scaling, const Shape* shape, void* stream) {
    const std::initializer_list<const void*> pointers = {norm->grad_stream, norm->grad_normed, norm->stream,
                                                         norm->weight, norm->d_x, norm->d_residual, norm->partial};
    return dispatch(*shape, pointers, [&](auto x, auto s, auto vector) {
        using X = decltype(x);
        using S = decltype(s);
        const int result = launch(norm_backward<X, S, vector>, prores_cuda_chunks(shape),
                                  row_threads(*shape, norm_threads), stream, *norm, *scaling, *shape,
                                  chunk_rows(*shape));
        if (result != cudaSuccess) return result;
        return launch_sum<X, S>(norm->partial, norm->d_weight, norm->d_bias, *shape, stream);
    });
}
