// Vector helpers for the CPU kernels: 8 float lanes, whatever the machine has underneath.
//
// Everything is written so that row i of an M-row call is computed by the same sequence of operations as
// when it is called alone; the templates over the number of rows differ only in how many rows share a load.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace eyas {

constexpr int64_t kPanel = 16; // weight rows (output columns) interleaved in one panel
constexpr int kLanes = 8;

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));

inline f32x8 load(const float* p) {
  f32x8 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store(float* p, f32x8 v) {
  std::memcpy(p, &v, sizeof(v));
}

inline f32x8 splat(float x) {
  return f32x8{x, x, x, x, x, x, x, x};
}

inline i32x8 widen(const int8_t* p) {
#if defined(__AVX2__)
  return (i32x8)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  i32x8 v;
  for (int i = 0; i < kLanes; i++) v[i] = p[i];
  return v;
#endif
}

inline i32x8 widen(const uint8_t* p) {
#if defined(__AVX2__)
  return (i32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  i32x8 v;
  for (int i = 0; i < kLanes; i++) v[i] = p[i];
  return v;
#endif
}

inline f32x8 to_float(i32x8 v) {
  return __builtin_convertvector(v, f32x8);
}

// A tensor handle seen as a strided block of elements. Sizes and strides are in elements.
struct View {
  void* data = nullptr;
  int64_t ndim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
  bool row_major() const { // the last dimension is dense
    return ndim > 0 && (strides[ndim - 1] == 1 || sizes[ndim - 1] == 1);
  }
};

inline AOTITorchError view(AtenTensorHandle t, View& out) {
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  if (aoti_torch_get_data_ptr(t, &out.data) || aoti_torch_get_dim(t, &out.ndim) ||
      aoti_torch_get_sizes(t, &sizes) || aoti_torch_get_strides(t, &strides))
    return AOTI_TORCH_FAILURE;
  out.sizes = sizes;
  out.strides = strides;
  return AOTI_TORCH_SUCCESS;
}

inline AOTITorchError new_f32(int64_t ndim, const int64_t* sizes, const int64_t* strides, AtenTensorHandle* out) {
  return aoti_torch_empty_strided(
      ndim, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, out);
}

} // namespace eyas
