// megatron_prores._C: importing it registers the operators; its functions say what was built and what runs.
#include <pybind11/pybind11.h>

#include "cpu.h"

namespace py = pybind11;

#ifndef PRORES_CUDA_VERSION
#define PRORES_CUDA_VERSION ""
#define PRORES_CUDA_ARCHITECTURES ""
#endif

PYBIND11_MODULE(_C, module) {
    module.doc() = "The fused operators prores::*, loaded by importing this module after torch.";
    module.def(
        "build_info",
        [] {
            py::dict info;
            info["compiler"] = PRORES_COMPILER;
            info["torch_headers"] = PRORES_TORCH_VERSION;
            info["cuda_version"] = PRORES_CUDA_VERSION;
            info["cuda_architectures"] = PRORES_CUDA_ARCHITECTURES;
            info["instruction_set"] = prores::cpu_kernels().instruction_set;
            return info;
        },
        "Compiler, torch headers, CUDA version and GPU architectures (empty: CPU only), and the CPU's instruction set.");
    module.def("use_instruction_set", &prores::use_instruction_set, py::arg("name"),
               "Run the CPU kernels of 'base', 'avx2' or 'avx512' from now on; False where this CPU has it not.");
}
