// AOTInductor's C interface for dense tensors on the host, without PyTorch.
//
// Compiled methods ask for tensors through some thirty functions. This is all of them that a method needs whose
// operators are the compiler's own loops and our kernels; it lets such a program run where torch is not installed, in
// a tenth of the memory. Handles are not interchangeable with torch's: a program uses one or the other throughout.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kMaxDims = 8;
constexpr size_t kAlignment = 64;

struct Storage {
  void* data;
  size_t nbytes;
  bool owned;

  Storage(void* data, size_t nbytes, bool owned) : data(data), nbytes(nbytes), owned(owned) {}
  Storage(const Storage&) = delete;
  ~Storage() {
    if (owned) std::free(data);
  }
};

// torch's ScalarType codes
constexpr int32_t kUInt8 = 0, kInt8 = 1, kInt16 = 2, kInt32 = 3, kInt64 = 4, kFloat16 = 5, kFloat32 = 6, kFloat64 = 7,
                  kBool = 11, kBFloat16 = 15;

size_t element_size(int32_t dtype) {
  switch (dtype) {
    case kUInt8:
    case kInt8:
    case kBool: return 1;
    case kInt16:
    case kFloat16:
    case kBFloat16: return 2;
    case kInt32:
    case kFloat32: return 4;
    case kInt64:
    case kFloat64: return 8;
    default: throw std::runtime_error("scalar type " + std::to_string(dtype) + " is not supported without torch");
  }
}

} // namespace

struct AtenTensorOpaque {
  std::shared_ptr<Storage> storage;
  int64_t ndim = 0, offset = 0; // offset in elements
  int64_t sizes[kMaxDims], strides[kMaxDims];
  int32_t dtype = 0;

  char* data() const {
    return static_cast<char*>(storage->data) + offset * element_size(dtype);
  }
};

namespace {

size_t extent(int64_t ndim, const int64_t* sizes, const int64_t* strides) { // elements from the first to the last, inclusive
  int64_t last = 0;
  for (int64_t d = 0; d < ndim; d++) {
    if (sizes[d] == 0) return 0;
    last += (sizes[d] - 1) * strides[d];
  }
  return last + 1;
}

AtenTensorHandle make(
    std::shared_ptr<Storage> storage, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype) {
  if (ndim > kMaxDims) throw std::runtime_error("tensors of more than 8 dimensions are not supported without torch");
  auto* tensor = new AtenTensorOpaque;
  tensor->storage = std::move(storage);
  tensor->ndim = ndim;
  tensor->offset = offset;
  tensor->dtype = dtype;
  std::copy(sizes, sizes + ndim, tensor->sizes);
  std::copy(strides, strides + ndim, tensor->strides);
  return tensor;
}

template <typename F>
AOTITorchError guarded(F body) {
  try {
    body();
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception&) {
    return AOTI_TORCH_FAILURE;
  }
}

thread_local bool grad_mode = true;

} // namespace

extern "C" {

int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_device_type_cuda() { return 1; }
int32_t aoti_torch_layout_strided() { return 0; }
int32_t aoti_torch_dtype_uint8() { return kUInt8; }
int32_t aoti_torch_dtype_int8() { return kInt8; }
int32_t aoti_torch_dtype_int16() { return kInt16; }
int32_t aoti_torch_dtype_int32() { return kInt32; }
int32_t aoti_torch_dtype_int64() { return kInt64; }
int32_t aoti_torch_dtype_float16() { return kFloat16; }
int32_t aoti_torch_dtype_float32() { return kFloat32; }
int32_t aoti_torch_dtype_float64() { return kFloat64; }
int32_t aoti_torch_dtype_bool() { return kBool; }
int32_t aoti_torch_dtype_bfloat16() { return kBFloat16; }
size_t aoti_torch_dtype_element_size(int32_t dtype) { return element_size(dtype); }

bool aoti_torch_grad_mode_is_enabled() { return grad_mode; }
void aoti_torch_grad_mode_set_enabled(bool enabled) { grad_mode = enabled; }

void aoti_torch_check(bool cond, const char* func, const char* file, uint32_t line, const char* msg) {
  if (!cond) throw std::runtime_error(std::string(msg) + " (" + func + ", " + file + ":" + std::to_string(line) + ")");
}

AOTITorchError aoti_torch_empty_strided(
    int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type, int32_t,
    AtenTensorHandle* out) {
  return guarded([&] {
    if (device_type != 0) throw std::runtime_error("only host tensors are supported without torch");
    const size_t nbytes = extent(ndim, sizes, strides) * element_size(dtype);
    const size_t rounded = std::max(kAlignment, (nbytes + kAlignment - 1) / kAlignment * kAlignment);
    void* data = std::aligned_alloc(kAlignment, rounded);
    if (!data) throw std::bad_alloc();
    *out = make(std::make_shared<Storage>(data, nbytes, true), ndim, sizes, strides, 0, dtype);
  });
}

AOTITorchError aoti_torch_create_tensor_from_blob(
    void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t, int32_t,
    AtenTensorHandle* out) {
  return guarded([&] {
    const size_t nbytes = (offset + extent(ndim, sizes, strides)) * element_size(dtype);
    *out = make(std::make_shared<Storage>(data, nbytes, false), ndim, sizes, strides, offset, dtype);
  });
}

AOTITorchError aoti_torch_create_tensor_from_blob_v2(
    void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype,
    int32_t device_type, int32_t device_index, AtenTensorHandle* out, int32_t, const uint8_t*, int64_t) {
  return aoti_torch_create_tensor_from_blob(data, ndim, sizes, strides, offset, dtype, device_type, device_index, out);
}

AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* out) {
  return guarded([&] { *out = new AtenTensorOpaque(*tensor); });
}

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor) {
  delete tensor;
  return AOTI_TORCH_SUCCESS;
}

// `offset` counts from the tensor's own first element, not from its storage's.
AOTITorchError aoti_torch__reinterpret_tensor(
    AtenTensorHandle self, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset, AtenTensorHandle* out) {
  return guarded([&] { *out = make(self->storage, ndim, sizes, strides, self->offset + offset, self->dtype); });
}

AOTITorchError aoti_torch_clone(AtenTensorHandle self, AtenTensorHandle* out) { // strides kept
  return guarded([&] {
    const size_t nbytes = extent(self->ndim, self->sizes, self->strides) * element_size(self->dtype);
    if (aoti_torch_empty_strided(self->ndim, self->sizes, self->strides, self->dtype, 0, 0, out)) throw std::bad_alloc();
    std::memcpy((*out)->storage->data, self->data(), nbytes);
  });
}

AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** out) {
  return guarded([&] { *out = tensor->data(); });
}

AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle tensor, int64_t* out) {
  *out = static_cast<int64_t>(tensor->storage->nbytes);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle tensor, int64_t* out) {
  *out = tensor->offset;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* out) {
  *out = tensor->ndim;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* out) {
  *out = 1;
  for (int64_t d = 0; d < tensor->ndim; d++) *out *= tensor->sizes[d];
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** out) {
  *out = tensor->sizes;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** out) {
  *out = tensor->strides;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_size(AtenTensorHandle tensor, int64_t d, int64_t* out) {
  *out = tensor->sizes[d];
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_stride(AtenTensorHandle tensor, int64_t d, int64_t* out) {
  *out = tensor->strides[d];
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* out) {
  *out = tensor->dtype;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t* out) {
  *out = 0;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* out) {
  *out = 0;
  return AOTI_TORCH_SUCCESS;
}

// One call of a chain of compiled blocks. Values are numbered; `inputs` names those that the call takes: v for a value
// that is kept, ~v for one whose handle is given away. Its results become the values from `first_output` on.
struct ChainCall {
  int32_t (*run)(void* container, AtenTensorHandle*, size_t, AtenTensorHandle*, size_t, void* stream, void* proxy);
  void* container;
  const int64_t* inputs;
  int64_t n_inputs, first_output, n_outputs;
};

// Runs a chain over the handles of its values. Returns 0, or the number (from 1) of the call that failed.
int64_t eyas_run_chain(const ChainCall* calls, int64_t n_calls, AtenTensorHandle* values) {
  std::vector<AtenTensorHandle> inputs;
  for (int64_t i = 0; i < n_calls; i++) {
    const ChainCall& call = calls[i];
    inputs.resize(call.n_inputs);
    for (int64_t k = 0; k < call.n_inputs; k++) {
      const int64_t v = call.inputs[k];
      inputs[k] = v < 0 ? std::exchange(values[~v], nullptr) : new AtenTensorOpaque(*values[v]);
    }
    if (call.run(call.container, inputs.data(), call.n_inputs, values + call.first_output, call.n_outputs, nullptr, nullptr)) {
      return i + 1;
    }
  }
  return 0;
}

} // extern "C"
