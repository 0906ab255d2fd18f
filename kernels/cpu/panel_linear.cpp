// y[M, N] = x[M, K] @ W[N, K]^T for weights stored in panels: [ceil(N/16), K, 16], float32, int8 or int4.
//
// One pass over the weights serves up to six rows; every output element is one sum that adds its products in the
// order k = 0 .. K-1, so a row's bits do not depend on how many rows come with it. Threads own whole panels: there is
// no reduction between threads.

#include "panels.h"

#include <algorithm>
#include <type_traits>

namespace eyas {
namespace {

// A panel of a format answers run(x, ldx, K, acc) for R rows: acc[r] are row r's sixteen sums, each of which adds its
// products in the order of k, whatever R is.

struct F32Panel {
  const float* w; // [K, 16]

  template <int R>
  void run(const float* x, int64_t ldx, int64_t K, f32x8 (&acc)[R][2]) const {
    for (int64_t k = 0; k < K; k++) {
      const f32x8 w0 = load(w + k * kPanel), w1 = load(w + k * kPanel + kLanes);
      for (int r = 0; r < R; r++) {
        const f32x8 xk = splat(x[r * ldx + k]);
        acc[r][0] += w0 * xk;
        acc[r][1] += w1 * xk;
      }
    }
  }
};

struct Int8Panel {
  const int8_t* w; // [K, 16]
  const float* scales; // [16]

  template <int R>
  void run(const float* x, int64_t ldx, int64_t K, f32x8 (&acc)[R][2]) const {
    for (int64_t k = 0; k < K; k++) {
      const f32x8 w0 = to_float(widen(w + k * kPanel)), w1 = to_float(widen(w + k * kPanel + kLanes));
      for (int r = 0; r < R; r++) {
        const f32x8 xk = splat(x[r * ldx + k]);
        acc[r][0] += w0 * xk;
        acc[r][1] += w1 * xk;
      }
    }
    const f32x8 s0 = load(scales), s1 = load(scales + kLanes);
    for (int r = 0; r < R; r++) {
      acc[r][0] *= s0;
      acc[r][1] *= s1;
    }
  }
};

// Two consecutive k share a byte: the even one in the low nibble. A group's 16 scales and 16 offsets lie together.
struct Int4Panel {
  const uint8_t* w; // [ceil(K/2), 16]
  const float* scale_offset; // [groups, 2, 16]
  int64_t group;

  template <int R>
  void run(const float* x, int64_t ldx, int64_t K, f32x8 (&acc)[R][2]) const {
    for (int64_t begin = 0, g = 0; begin < K; begin += group, g++) {
      const float* so = scale_offset + g * 2 * kPanel;
      const f32x8 s0 = load(so), s1 = load(so + kLanes);
      const f32x8 o0 = load(so + kPanel), o1 = load(so + kPanel + kLanes);
      const int64_t end = std::min(begin + group, K);
      for (int64_t k = begin; k < end; k += 2) {
        const uint8_t* p = w + k / 2 * kPanel;
        const i32x8 q0 = widen(p), q1 = widen(p + kLanes);
        const f32x8 even0 = to_float(q0 & 15) * s0 + o0, even1 = to_float(q1 & 15) * s1 + o1;
        const f32x8 odd0 = to_float(q0 >> 4) * s0 + o0, odd1 = to_float(q1 >> 4) * s1 + o1;
        const bool has_odd = k + 1 < K;
        for (int r = 0; r < R; r++) {
          const f32x8 xe = splat(x[r * ldx + k]);
          acc[r][0] += even0 * xe;
          acc[r][1] += even1 * xe;
          if (has_odd) {
            const f32x8 xo = splat(x[r * ldx + k + 1]);
            acc[r][0] += odd0 * xo;
            acc[r][1] += odd1 * xo;
          }
        }
      }
    }
  }
};

template <int R, typename Panel>
void rows(const Panel& panel, const float* x, int64_t ldx, int64_t K, float* y, int64_t ldy, int64_t columns) {
  f32x8 acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = splat(0.0f);
  panel.template run<R>(x, ldx, K, acc);
  for (int r = 0; r < R; r++) std::memcpy(y + r * ldy, acc[r], columns * sizeof(float));
}

// All M rows of one panel, at most six at a time: their sums and a panel's k fill the sixteen vector registers.
template <typename Panel>
void all_rows(
    const Panel& panel, const float* x, int64_t ldx, int64_t M, int64_t K, float* y, int64_t ldy, int64_t columns) {
  auto take = [&](auto R) {
    rows<R.value>(panel, x, ldx, K, y, ldy, columns);
    x += R.value * ldx;
    y += R.value * ldy;
    M -= R.value;
  };
  while (M > 8) take(std::integral_constant<int, 6>{});
  if (M > 6) take(std::integral_constant<int, 4>{}); // 4 + 3 and 4 + 4 keep more sums in flight than 6 + 1 and 6 + 2
  switch (M) {
    case 1: return take(std::integral_constant<int, 1>{});
    case 2: return take(std::integral_constant<int, 2>{});
    case 3: return take(std::integral_constant<int, 3>{});
    case 4: return take(std::integral_constant<int, 4>{});
    case 5: return take(std::integral_constant<int, 5>{});
    case 6: return take(std::integral_constant<int, 6>{});
    default: return;
  }
}

// panel(p) gives panel p.
template <typename MakePanel>
AOTITorchError linear(AtenTensorHandle x_handle, int64_t N, MakePanel panel, AtenTensorHandle* out) {
  View x;
  if (view(x_handle, x) || x.ndim != 2 || !x.row_major()) return AOTI_TORCH_FAILURE;
  const int64_t M = x.sizes[0], K = x.sizes[1], ldx = x.strides[0];
  const int64_t sizes[2] = {M, N}, strides[2] = {N, 1};
  if (new_f32(2, sizes, strides, out)) return AOTI_TORCH_FAILURE;
  void* data = nullptr;
  if (aoti_torch_get_data_ptr(*out, &data)) return AOTI_TORCH_FAILURE;
  float* y = static_cast<float*>(data);
  const int64_t panels = (N + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels; p++) {
    const int64_t columns = std::min(N - p * kPanel, kPanel);
    all_rows(panel(p), x.as<const float>(), ldx, M, K, y + p * kPanel, N, columns);
  }
  return AOTI_TORCH_SUCCESS;
}

} // namespace
} // namespace eyas

extern "C" {

AOTITorchError aoti_torch_cpu_panel_linear(
    AtenTensorHandle x, AtenTensorHandle weight, int64_t out_features, AtenTensorHandle* out) {
  eyas::View w;
  if (eyas::view(weight, w)) return AOTI_TORCH_FAILURE;
  const float* base = w.as<const float>();
  const int64_t stride = w.sizes[1] * eyas::kPanel;
  return eyas::linear(x, out_features, [=](int64_t p) { return eyas::F32Panel{base + p * stride}; }, out);
}

AOTITorchError aoti_torch_cpu_panel_int8_linear(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scales, int64_t out_features, AtenTensorHandle* out) {
  eyas::View w, s;
  if (eyas::view(weight, w) || eyas::view(scales, s)) return AOTI_TORCH_FAILURE;
  const int8_t* base = w.as<const int8_t>();
  const float* scale = s.as<const float>();
  const int64_t stride = w.sizes[1] * eyas::kPanel;
  return eyas::linear(
      x, out_features,
      [=](int64_t p) { return eyas::Int8Panel{base + p * stride, scale + p * eyas::kPanel}; }, out);
}

AOTITorchError aoti_torch_cpu_panel_int4_linear(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale_offset, int64_t group_size,
    int64_t out_features, AtenTensorHandle* out) {
  eyas::View w, so;
  if (eyas::view(weight, w) || eyas::view(scale_offset, so)) return AOTI_TORCH_FAILURE;
  const uint8_t* base = w.as<const uint8_t>();
  const float* scale = so.as<const float>();
  const int64_t stride = w.sizes[1] * eyas::kPanel, so_stride = so.sizes[1] * 2 * eyas::kPanel;
  return eyas::linear(
      x, out_features,
      [=](int64_t p) { return eyas::Int4Panel{base + p * stride, scale + p * so_stride, group_size}; }, out);
}

} // extern "C"
