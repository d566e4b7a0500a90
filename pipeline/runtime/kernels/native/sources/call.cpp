// Operators of torch that call a kernel by its address: onnxline::call_1 has one result, call_4 four, with one overload for
// each number of operands that are read (TorchScript finds an overload by their number alone).
//
// A graph of TorchScript can thus call kernels between operators of torch. The arguments are the address, the settings
// (a tensor that holds their bytes), the results, and what is read.

#include <string>

#include <torch/library.h>

#include "vectors.h"

typedef void Kernel(void *const *operands, const Setting *settings);

constexpr size_t MOST_RESULTS = 4, MOST_READ = 8;

static void call_kernel(torch::jit::Stack *stack, size_t count) {
  auto arguments = torch::jit::last(*stack, count);
  void *operands[MOST_RESULTS + MOST_READ];
  for (size_t i = 2; i < count; i++) operands[i - 2] = arguments[i].toTensor().mutable_data_ptr();
  auto *settings = static_cast<const Setting *>(arguments[1].toTensor().const_data_ptr());
  reinterpret_cast<Kernel *>(arguments[0].toInt())(operands, settings);
  torch::jit::drop(*stack, count);
}

static void call(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  call_kernel(stack, op.schema().arguments().size());
}

TORCH_LIBRARY(onnxline, library) {
  for (size_t results = 1; results <= MOST_RESULTS; results++)
    for (size_t read = 0; read <= MOST_READ; read++) {
      std::string name = "call_" + std::to_string(results) + ".reads_" + std::to_string(read);
      std::string schema = name + "(int kernel, Tensor settings";
      for (size_t i = 0; i < results; i++) schema += ", Tensor(" + std::string(1, 'a' + i) + "!) result" + std::to_string(i);
      for (size_t i = 0; i < read; i++) schema += ", Tensor read" + std::to_string(i);
      library.def(torch::schema((schema + ") -> ()").c_str(), c10::AliasAnalysisKind::FROM_SCHEMA));
      library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CPU, torch::CppFunction::makeFromBoxedFunction<&call>()));
    }
}
