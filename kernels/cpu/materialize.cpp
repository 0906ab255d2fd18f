// A copy of a tensor in memory of its own: what the compiler sees is opaque, so it is made once.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

extern "C" AOTITorchError aoti_torch_cpu_materialize(AtenTensorHandle x, AtenTensorHandle* out) {
  return aoti_torch_clone(x, out);
}
