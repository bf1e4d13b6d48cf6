// The operators prores::*, registered through torch's stable ABI: one build works with every torch from 2.10 on.
// Gradients and shapes for torch.compile are registered in Python (megatron_prores/ops/fused.py).
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "cpu.h"
#ifdef PRORES_CUDA
#include "cuda.h"
// In libtorch_cuda, which a CPU-only torch has not: weak, so that one build loads beside either.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace prores {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

Dtype dtype_of(const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case ScalarType::Float: return Dtype::float32;
        case ScalarType::BFloat16: return Dtype::bfloat16;
        case ScalarType::Half: return Dtype::float16;
        case ScalarType::Double: return Dtype::float64;
        default: STD_TORCH_CHECK(false, "prores: float32, bfloat16, float16 or float64 expected");
    }
}

void check_types(const Shape& shape) {
    const bool half = shape.x == Dtype::bfloat16 || shape.x == Dtype::float16;
    STD_TORCH_CHECK(shape.x == shape.stream || (half && shape.stream == Dtype::float32),
                    "prores: the residual must have the branch's dtype, or float32 for a half-precision branch");
}

void check_input(const Tensor& tensor, const Tensor& like, int64_t numel, const char* name) {
    STD_TORCH_CHECK(tensor.numel() == numel, "prores: ", name, " must have ", numel, " elements, not ",
                    tensor.numel());
    STD_TORCH_CHECK(tensor.is_contiguous(), "prores: ", name, " must be contiguous");
    STD_TORCH_CHECK(tensor.device() == like.device(), "prores: ", name, " is on another device than x");
}

Shape shape_of(const Tensor& x, const Tensor& stream) {
    STD_TORCH_CHECK(x.dim() > 0, "prores: x needs at least one dimension");
    const int64_t hidden = x.size(x.dim() - 1);
    const Shape shape = {hidden ? x.numel() / hidden : 0, hidden, dtype_of(x), dtype_of(stream)};
    check_types(shape);
    check_input(x, x, x.numel(), "x");
    check_input(stream, x, x.numel(), "residual");
    for (int64_t i = 0; i < x.dim(); ++i)
        STD_TORCH_CHECK(stream.dim() == x.dim() && stream.size(i) == x.size(i),
                        "prores: residual and x must have the same shape");
    return shape;
}

Scaling scaling_of(const Tensor& x, const Tensor& alpha, const MaybeTensor& rng, double prob, double residual_scale) {
    check_input(alpha, x, 1, "alpha");
    STD_TORCH_CHECK(alpha.scalar_type() == ScalarType::Float, "prores: alpha must be float32");
    STD_TORCH_CHECK(prob >= 0 && prob <= 1, "prores: a dropout probability is between 0 and 1, got ", prob);
    Scaling scaling = {static_cast<const float*>(alpha.const_data_ptr()), nullptr, 0, 1,
                       residual_scale};
    if (rng) {
        check_input(*rng, x, 2, "rng");
        STD_TORCH_CHECK(rng->scalar_type() == ScalarType::Long, "prores: rng must be int64");
        scaling.rng = static_cast<const int64_t*>(rng->const_data_ptr());
        scaling.threshold = static_cast<uint32_t>(std::lround(prob * 65536));
        scaling.keep_scale = scaling.threshold == 65536 ? 0 : 65536.0 / (65536 - scaling.threshold);
    }
    return scaling;
}

const void* vector_data(const MaybeTensor& vector, const Tensor& x, const Shape& shape, const char* name) {
    if (!vector) return nullptr;
    check_input(*vector, x, shape.hidden, name);
    STD_TORCH_CHECK(vector->scalar_type() == x.scalar_type(), "prores: ", name, " must have x's dtype");
    return vector->const_data_ptr();
}

ScalarType accumulator(const Tensor& stream) {
    return stream.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// What stands for a gradient that is not wanted.
Tensor none(const Tensor& like) { return torch::stable::new_empty(like, {0}); }

struct Cpu {
    // Below this many elements a thread costs more than it saves.
    static int64_t rows_per_thread(const Shape& shape) { return 1 + 32768 / shape.hidden; }

    static int64_t chunks(const Shape& shape) { return cpu_chunks(shape); }

    static int64_t chunks_per_thread(const Shape& shape) {
        return 1 + rows_per_thread(shape) * chunks(shape) / shape.rows;
    }

    static void add(const AddForward& call, const Scaling& scaling, const Shape& shape, const Tensor&) {
        if (shape.rows == 0) return;
        torch::stable::parallel_for(0, shape.rows, rows_per_thread(shape), [&](int64_t begin, int64_t end) {
            cpu_kernels().add_forward(call, scaling, shape, begin, end);
        });
    }

    static void norm(const NormForward& call, const Scaling& scaling, const Shape& shape, const Tensor&) {
        if (shape.rows == 0) return;
        torch::stable::parallel_for(0, shape.rows, rows_per_thread(shape), [&](int64_t begin, int64_t end) {
            cpu_kernels().norm_forward(call, scaling, shape, begin, end);
        });
    }

    static void sum(const void* partial, void* sum, const Shape& shape) {
        if (!sum || shape.hidden == 0) return;
        torch::stable::parallel_for(0, shape.hidden, 1024, [&](int64_t begin, int64_t end) {
            cpu_kernels().sum_chunks(partial, sum, shape, begin, end);
        });
    }

    static void add_backward(const AddBackward& call, const Scaling& scaling, const Shape& shape, const Tensor&) {
        if (shape.rows > 0)
            torch::stable::parallel_for(0, chunks(shape), chunks_per_thread(shape), [&](int64_t begin, int64_t end) {
                cpu_kernels().add_backward(call, scaling, shape, begin, end);
            });
        sum(call.partial, call.d_bias, shape);
    }

    static void norm_backward(const NormBackward& call, const Scaling& scaling, const Shape& shape, const Tensor&) {
        if (shape.rows > 0)
            torch::stable::parallel_for(0, chunks(shape), chunks_per_thread(shape), [&](int64_t begin, int64_t end) {
                cpu_kernels().norm_backward(call, scaling, shape, begin, end);
            });
        sum(call.partial, call.d_weight, shape);
        const int64_t width = shape.stream == Dtype::float64 ? 8 : 4;
        sum(static_cast<const char*>(call.partial) + width * chunks(shape) * shape.hidden, call.d_bias, shape);
    }
};

#ifdef PRORES_CUDA
struct Cuda {
    static int64_t chunks(const Shape& shape) { return prores_cuda_chunks(&shape); }

    template <class Launch, class Call>
    static void launch(Launch* kernel, const Call& call, const Scaling& scaling, const Shape& shape, const Tensor& x) {
        STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream, "prores: this torch has no CUDA");
        torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
        void* stream = nullptr;
        STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream) == 0,
                        "prores: no current CUDA stream");
        const int error = kernel(&call, &scaling, &shape, stream);
        STD_TORCH_CHECK(error == 0, "prores: CUDA kernel: ", prores_cuda_error(error));
    }

    static void add(const AddForward& call, const Scaling& scaling, const Shape& shape, const Tensor& x) {
        launch(prores_cuda_add_forward, call, scaling, shape, x);
    }
    static void norm(const NormForward& call, const Scaling& scaling, const Shape& shape, const Tensor& x) {
        launch(prores_cuda_norm_forward, call, scaling, shape, x);
    }
    static void add_backward(const AddBackward& call, const Scaling& scaling, const Shape& shape, const Tensor& x) {
        launch(prores_cuda_add_backward, call, scaling, shape, x);
    }
    static void norm_backward(const NormBackward& call, const Scaling& scaling, const Shape& shape, const Tensor& x) {
        launch(prores_cuda_norm_backward, call, scaling, shape, x);
    }
};
#endif

template <class Device>
Tensor add(Tensor x, Tensor residual, Tensor alpha, MaybeTensor bias, MaybeTensor rng, double prob,
           double residual_scale) {
    const Shape shape = shape_of(x, residual);
    Tensor out = torch::stable::empty_like(residual);
    const AddForward call = {x.const_data_ptr(), residual.const_data_ptr(), vector_data(bias, x, shape, "bias"),
                             out.mutable_data_ptr()};
    Device::add(call, scaling_of(x, alpha, rng, prob, residual_scale), shape, x);
    return out;
}

// (d_x, d_residual, d_bias); d_residual is empty where residual_scale is 1: it is grad itself then.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> add_backward(Tensor grad, Tensor alpha, MaybeTensor rng, double prob,
                                                double residual_scale, ScalarType x_dtype, bool with_bias) {
    Tensor d_x = torch::stable::new_empty(grad, grad.sizes(), x_dtype);
    const Shape shape = shape_of(d_x, grad);
    Tensor d_residual = residual_scale == 1 ? none(grad) : torch::stable::empty_like(grad);
    Tensor d_bias = with_bias ? torch::stable::new_empty(d_x, {shape.hidden}) : none(d_x);
    Tensor partial = with_bias
                         ? torch::stable::new_empty(grad, {Device::chunks(shape), shape.hidden}, accumulator(grad))
                         : none(grad);
    const AddBackward call = {grad.const_data_ptr(), d_x.mutable_data_ptr(),
                              residual_scale == 1 ? nullptr : d_residual.mutable_data_ptr(),
                              with_bias ? d_bias.mutable_data_ptr() : nullptr,
                              with_bias ? partial.mutable_data_ptr() : nullptr};
    Device::add_backward(call, scaling_of(grad, alpha, rng, prob, residual_scale), shape, grad);
    return {d_x, d_residual, d_bias};
}

// (stream, normed, rstd)
template <class Device>
std::tuple<Tensor, Tensor, Tensor> add_norm(Tensor x, Tensor residual, Tensor alpha, MaybeTensor bias, MaybeTensor rng,
                                            Tensor weight, double prob, double residual_scale, double eps) {
    const Shape shape = shape_of(x, residual);
    Tensor stream = torch::stable::empty_like(residual), normed = torch::stable::empty_like(x);
    Tensor rstd = torch::stable::new_empty(residual, {shape.rows}, accumulator(residual));
    const NormForward call = {{x.const_data_ptr(), residual.const_data_ptr(), vector_data(bias, x, shape, "bias"),
                               stream.mutable_data_ptr()},
                              vector_data(weight, x, shape, "weight"),
                              normed.mutable_data_ptr(),
                              rstd.mutable_data_ptr(),
                              eps};
    Device::norm(call, scaling_of(x, alpha, rng, prob, residual_scale), shape, x);
    return {stream, normed, rstd};
}

// (d_x, d_residual, d_bias, d_weight)
template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> add_norm_backward(Tensor grad_stream, Tensor grad_normed, Tensor stream,
                                                             Tensor rstd, Tensor weight, Tensor alpha, MaybeTensor rng,
                                                             double prob, double residual_scale, bool with_bias) {
    const Shape shape = shape_of(grad_normed, stream);
    check_input(grad_stream, grad_normed, stream.numel(), "grad_stream");
    check_input(rstd, grad_normed, shape.rows, "rstd");
    Tensor d_x = torch::stable::empty_like(grad_normed), d_residual = torch::stable::empty_like(stream);
    Tensor d_weight = torch::stable::empty_like(weight);
    Tensor d_bias = with_bias ? torch::stable::empty_like(weight) : none(weight);
    Tensor partial = torch::stable::new_empty(stream, {(with_bias ? 2 : 1) * Device::chunks(shape), shape.hidden},
                                              accumulator(stream));
    const NormBackward call = {grad_stream.const_data_ptr(),
                               grad_normed.const_data_ptr(),
                               stream.const_data_ptr(),
                               rstd.const_data_ptr(),
                               vector_data(weight, grad_normed, shape, "weight"),
                               d_x.mutable_data_ptr(),
                               d_residual.mutable_data_ptr(),
                               with_bias ? d_bias.mutable_data_ptr() : nullptr,
                               d_weight.mutable_data_ptr(),
                               partial.mutable_data_ptr()};
    Device::norm_backward(call, scaling_of(grad_normed, alpha, rng, prob, residual_scale), shape, grad_normed);
    return {d_x, d_residual, d_bias, d_weight};
}

STABLE_TORCH_LIBRARY(prores, library) {
    library.def(
        "scaled_residual(Tensor x, Tensor residual, Tensor alpha, Tensor? bias, Tensor? rng, float prob, "
        "float residual_scale) -> Tensor");
    library.def(
        "scaled_residual_backward(Tensor grad, Tensor alpha, Tensor? rng, float prob, float residual_scale, "
        "ScalarType x_dtype, bool with_bias) -> (Tensor, Tensor, Tensor)");
    library.def(
        "scaled_residual_rms_norm(Tensor x, Tensor residual, Tensor alpha, Tensor? bias, Tensor? rng, Tensor weight, "
        "float prob, float residual_scale, float eps) -> (Tensor, Tensor, Tensor)");
    library.def(
        "scaled_residual_rms_norm_backward(Tensor grad_stream, Tensor grad_normed, Tensor stream, Tensor rstd, "
        "Tensor weight, Tensor alpha, Tensor? rng, float prob, float residual_scale, bool with_bias) -> "
        "(Tensor, Tensor, Tensor, Tensor)");
}

template <class Device>
void implement(torch::stable::detail::StableLibrary& library) {
    library.impl("scaled_residual", TORCH_BOX(&add<Device>));
    library.impl("scaled_residual_backward", TORCH_BOX(&add_backward<Device>));
    library.impl("scaled_residual_rms_norm", TORCH_BOX(&add_norm<Device>));
    library.impl("scaled_residual_rms_norm_backward", TORCH_BOX(&add_norm_backward<Device>));
}

STABLE_TORCH_LIBRARY_IMPL(prores, CPU, library) { implement<Cpu>(library); }
#ifdef PRORES_CUDA
STABLE_TORCH_LIBRARY_IMPL(prores, CUDA, library) { implement<Cuda>(library); }
#endif

}  // namespace
}  // namespace prores
