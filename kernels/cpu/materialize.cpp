// A copy of a tensor in memory of its own, dense in row-major order: what the compiler cannot look into, it makes once.

#include "panels.h"

#include <vector>

namespace eyas {
namespace {

// Copies `size` bytes an element from a strided block to a dense one; returns the end of what was written.
char* copy(const char* from, char* to, int64_t dim, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t size) {
  if (dim == ndim) {
    std::memcpy(to, from, size);
    return to + size;
  }
  if (dim == ndim - 1 && strides[dim] == 1) {
    std::memcpy(to, from, sizes[dim] * size);
    return to + sizes[dim] * size;
  }
  for (int64_t i = 0; i < sizes[dim]; i++) to = copy(from + i * strides[dim] * size, to, dim + 1, ndim, sizes, strides, size);
  return to;
}

} // namespace
} // namespace eyas

extern "C" AOTITorchError aoti_torch_cpu_materialize(AtenTensorHandle x_handle, AtenTensorHandle* out) {
  eyas::View x;
  int32_t dtype = 0;
  if (eyas::view(x_handle, x) || aoti_torch_get_dtype(x_handle, &dtype)) return AOTI_TORCH_FAILURE;
  std::vector<int64_t> strides(x.ndim);
  int64_t count = 1;
  for (int64_t d = x.ndim - 1; d >= 0; d--) {
    strides[d] = count;
    count *= x.sizes[d];
  }
  if (aoti_torch_empty_strided(x.ndim, x.sizes, strides.data(), dtype, aoti_torch_device_type_cpu(), 0, out))
    return AOTI_TORCH_FAILURE;
  void* data = nullptr;
  if (aoti_torch_get_data_ptr(*out, &data)) return AOTI_TORCH_FAILURE;
  if (count) {
    const int64_t size = aoti_torch_dtype_element_size(dtype);
    eyas::copy(static_cast<const char*>(x.data), static_cast<char*>(data), 0, x.ndim, x.sizes, x.strides, size);
  }
  return AOTI_TORCH_SUCCESS;
}
