// y[M, N] = x[M, K] @ W[N, K]^T for weights stored in panels: [ceil(N/16), K, 16], float32, int8 or int4.
//
// One pass over the weights serves up to kMaxRows rows; every output element is one accumulator that adds
// its products in the order k = 0 .. K-1, so a row's bits do not depend on how many rows come with it.
// Threads own whole panels: there is no reduction between threads.

#include "panels.h"

namespace eyas {
namespace {

// A panel of a format answers run<R, V>(x, ldx, K, v, acc): R rows against V vectors of 8 columns from vector v on.

struct F32Panel {
  const float* w; // [K, 16]

  template <int R, int V>
  void run(const float* x, int64_t ldx, int64_t K, int v, f32x8 (&acc)[R][V]) const {
    for (int64_t k = 0; k < K; k++) {
      f32x8 wk[V];
      for (int i = 0; i < V; i++) wk[i] = load(w + k * kPanel + (v + i) * kLanes);
      for (int r = 0; r < R; r++) {
        const f32x8 xk = splat(x[r * ldx + k]);
        for (int i = 0; i < V; i++) acc[r][i] += wk[i] * xk;
      }
    }
  }
};

struct Int8Panel {
  const int8_t* w; // [K, 16]
  const float* scales; // [16]

  template <int R, int V>
  void run(const float* x, int64_t ldx, int64_t K, int v, f32x8 (&acc)[R][V]) const {
    for (int64_t k = 0; k < K; k++) {
      f32x8 wk[V];
      for (int i = 0; i < V; i++) wk[i] = to_float(widen(w + k * kPanel + (v + i) * kLanes));
      for (int r = 0; r < R; r++) {
        const f32x8 xk = splat(x[r * ldx + k]);
        for (int i = 0; i < V; i++) acc[r][i] += wk[i] * xk;
      }
    }
    for (int i = 0; i < V; i++) {
      const f32x8 s = load(scales + (v + i) * kLanes);
      for (int r = 0; r < R; r++) acc[r][i] *= s;
    }
  }
};

// Two consecutive k share a byte: the even one in the low nibble. A group's 16 scales and 16 offsets lie together.
struct Int4Panel {
  const uint8_t* w; // [ceil(K/2), 16]
  const float* scale_offset; // [groups, 2, 16]
  int64_t group;

  template <int R, int V>
  void run(const float* x, int64_t ldx, int64_t K, int v, f32x8 (&acc)[R][V]) const {
    for (int64_t begin = 0, g = 0; begin < K; begin += group, g++) {
      const float* so = scale_offset + g * 2 * kPanel + v * kLanes;
      const int64_t end = begin + group < K ? begin + group : K;
      for (int64_t k = begin; k < end; k += 2) {
        const bool has_odd = k + 1 < K;
        for (int i = 0; i < V; i++) {
          const f32x8 s = load(so + i * kLanes), o = load(so + kPanel + i * kLanes);
          const i32x8 q = widen(w + k / 2 * kPanel + (v + i) * kLanes);
          const f32x8 even = to_float(q & 15) * s + o, odd = to_float(q >> 4) * s + o;
          for (int r = 0; r < R; r++) acc[r][i] += even * splat(x[r * ldx + k]);
          if (has_odd) {
            for (int r = 0; r < R; r++) acc[r][i] += odd * splat(x[r * ldx + k + 1]);
          }
        }
      }
    }
  }
};

// R rows against the first `columns` columns from vector v on.
template <int R, int V, typename Panel>
void block(const Panel& panel, const float* x, int64_t ldx, int64_t K, int v, float* y, int64_t ldy, int64_t columns) {
  f32x8 acc[R][V];
  for (int r = 0; r < R; r++) {
    for (int i = 0; i < V; i++) acc[r][i] = splat(0.0f);
  }
  panel.template run<R, V>(x, ldx, K, v, acc);
  const int64_t first = v * kLanes, n = columns - first < V * kLanes ? columns - first : V * kLanes;
  for (int r = 0; r < R && n > 0; r++) std::memcpy(y + r * ldy + first, acc[r], n * sizeof(float));
}

// Sixteen vector registers hold six rows of two vectors, or eight rows of one: each weight is widened once for all of them.
template <int R, typename Panel>
void rows(const Panel& panel, const float* x, int64_t ldx, int64_t K, float* y, int64_t ldy, int64_t columns) {
  if constexpr (R <= 6) {
    block<R, 2>(panel, x, ldx, K, 0, y, ldy, columns);
  } else {
    block<R, 1>(panel, x, ldx, K, 0, y, ldy, columns);
    block<R, 1>(panel, x, ldx, K, 1, y, ldy, columns);
  }
}

template <typename Panel>
void panel_rows(
    const Panel& panel, const float* x, int64_t ldx, int64_t M, int64_t K, float* y, int64_t ldy, int64_t columns) {
  int64_t m = 0;
  for (; M - m > 8; m += 6) rows<6>(panel, x + m * ldx, ldx, K, y + m * ldy, ldy, columns);
  x += m * ldx;
  y += m * ldy;
  switch (M - m) {
    case 1: return rows<1>(panel, x, ldx, K, y, ldy, columns);
    case 2: return rows<2>(panel, x, ldx, K, y, ldy, columns);
    case 3: return rows<3>(panel, x, ldx, K, y, ldy, columns);
    case 4: return rows<4>(panel, x, ldx, K, y, ldy, columns);
    case 5: return rows<5>(panel, x, ldx, K, y, ldy, columns);
    case 6: return rows<6>(panel, x, ldx, K, y, ldy, columns);
    case 7: return rows<7>(panel, x, ldx, K, y, ldy, columns);
    case 8: return rows<8>(panel, x, ldx, K, y, ldy, columns);
    default: return;
  }
}

// make(p) returns panel p. The output keeps x's leading dimensions.
template <typename Make>
AOTITorchError linear(AtenTensorHandle x_handle, int64_t N, Make make, AtenTensorHandle* out) {
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
    const int64_t columns = N - p * kPanel < kPanel ? N - p * kPanel : kPanel;
    panel_rows(make(p), x.as<const float>(), ldx, M, K, y + p * kPanel, N, columns);
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
