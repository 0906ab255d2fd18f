// Scaled dot-product attention with a boolean mask, for few or many query rows over a KV cache.
//
// Keys are cut into splits of kSplit slots at fixed places. Every (query row, head) runs an online softmax
// over the splits in ascending order, and skips the splits in which it sees nothing; its arithmetic involves
// no other row, so a row's bits do not depend on the rows beside it. Slots that no row of a block sees are
// not read at all: the cost follows the live keys, and what lies in dead slots (NaN included) is harmless.

#include "panels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

namespace eyas {
namespace {

constexpr int64_t kSplit = 256; // keys in a split
constexpr int64_t kRowBlock = 32; // (row, head) pairs that share a pass over K and V
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

inline float sum(f32x8 v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// exp(x) for x <= 0: 2^n * p(r) with |r| <= ln(2)/2, a degree-6 polynomial; 2 ulp; 0 below -87.
inline f32x8 exp_negative(f32x8 x) {
  const f32x8 low = splat(-87.0f);
  const i32x8 underflow = x < low;
  x = (f32x8)(((i32x8)x & ~underflow) | ((i32x8)low & underflow));
  const f32x8 magic = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to the nearest integer
  const f32x8 shifted = x * 1.44269504088896341f + magic;
  const f32x8 n = shifted - magic;
  f32x8 r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  f32x8 p = splat(1.3981999507e-3f);
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const i32x8 exponent = ((i32x8)shifted - (i32x8)magic + 127) << 23;
  const f32x8 y = p * (f32x8)exponent;
  return (f32x8)((i32x8)y & ~underflow);
}

inline float exp_negative(float x) {
  return exp_negative(splat(x))[0];
}

// scores[r][j] = q[r] . k[j] for R rows and two keys at a time.
template <int R>
void dot_rows(const float* q, int64_t D, const float* k0, const float* k1, float* s0, float* s1) {
  f32x8 a0[R], a1[R];
  for (int r = 0; r < R; r++) a0[r] = a1[r] = splat(0.0f);
  for (int64_t d = 0; d < D; d += kLanes) {
    const f32x8 x0 = load(k0 + d), x1 = load(k1 + d);
    for (int r = 0; r < R; r++) {
      const f32x8 qd = load(q + r * D + d);
      a0[r] += qd * x0;
      a1[r] += qd * x1;
    }
  }
  for (int r = 0; r < R; r++) {
    s0[r * kSplit] = sum(a0[r]);
    s1[r * kSplit] = sum(a1[r]);
  }
}

// acc[r][d..d+16) += sum_j p[r][j] * v[j][d..d+16) over the listed keys, in their order.
template <int R>
void weigh_rows(const float* p, const float* v, int64_t ldv, const int32_t* keys, int64_t n, float* acc, int64_t D, int64_t d) {
  f32x8 a[R][2];
  for (int r = 0; r < R; r++) {
    a[r][0] = load(acc + r * D + d);
    a[r][1] = load(acc + r * D + d + kLanes);
  }
  for (int64_t i = 0; i < n; i++) {
    const int32_t j = keys[i];
    const f32x8 v0 = load(v + j * ldv + d), v1 = load(v + j * ldv + d + kLanes);
    for (int r = 0; r < R; r++) {
      const f32x8 w = splat(p[r * kSplit + j]);
      a[r][0] += w * v0;
      a[r][1] += w * v1;
    }
  }
  for (int r = 0; r < R; r++) {
    store(acc + r * D + d, a[r][0]);
    store(acc + r * D + d + kLanes, a[r][1]);
  }
}

template <typename F>
void by_rows(int64_t n, F f) { // calls f<R>(first row) over n rows in groups of at most four
  int64_t r = 0;
  for (; r + 4 <= n; r += 4) f(std::integral_constant<int, 4>{}, r);
  switch (n - r) {
    case 1: return f(std::integral_constant<int, 1>{}, r);
    case 2: return f(std::integral_constant<int, 2>{}, r);
    case 3: return f(std::integral_constant<int, 3>{}, r);
    default: return;
  }
}

struct Problem {
  const float *q, *k, *v;
  const bool* mask; // [M, L]
  float* out; // [H, M, D] strides below
  int64_t M, H, KV, G, L, D;
  int64_t q_h, q_m, k_h, k_l, v_h, v_l, mask_m, out_h, out_m;
  float scale;
};

// The running state of a block of (row, head) pairs of one KV head.
struct Block {
  int64_t kv, first, count; // pairs first .. first+count of [M * G], row-major in (m, g)
  float *q, *acc, *max, *denominator; // [count, D], [count, D], [count], [count]
};

void start(const Problem& p, Block& b) {
  for (int64_t i = 0; i < b.count; i++) {
    const int64_t m = (b.first + i) / p.G, h = b.kv * p.G + (b.first + i) % p.G;
    const float* q = p.q + h * p.q_h + m * p.q_m;
    for (int64_t d = 0; d < p.D; d++) b.q[i * p.D + d] = q[d] * p.scale;
    b.max[i] = kNegInf;
    b.denominator[i] = 0.0f;
  }
  std::fill(b.acc, b.acc + b.count * p.D, 0.0f);
}

// One split: fills this block's unnormalised sums and weights from nothing, in (acc, max, denominator).
void attend(const Problem& p, Block& b, int64_t split, float* scores) {
  const int64_t begin = split * kSplit, n = std::min(kSplit, p.L - begin);
  int32_t keys[kSplit];
  int64_t live = 0;
  const int64_t m_first = b.first / p.G, m_last = (b.first + b.count - 1) / p.G;
  for (int64_t j = 0; j < n; j++) {
    bool any = false;
    for (int64_t m = m_first; m <= m_last; m++) any |= p.mask[m * p.mask_m + begin + j];
    if (any) keys[live++] = static_cast<int32_t>(j);
  }
  if (!live) return;
  const float* k = p.k + b.kv * p.k_h + begin * p.k_l;
  const float* v = p.v + b.kv * p.v_h + begin * p.v_l;
  by_rows(b.count, [&](auto R, int64_t r) {
    for (int64_t i = 0; i < live; i += 2) {
      const int32_t j0 = keys[i], j1 = keys[std::min(i + 1, live - 1)];
      dot_rows<R.value>(b.q + r * p.D, p.D, k + j0 * p.k_l, k + j1 * p.k_l, scores + r * kSplit + j0, scores + r * kSplit + j1);
    }
  });
  for (int64_t i = 0; i < b.count; i++) {
    const bool* sees = p.mask + (b.first + i) / p.G * p.mask_m + begin;
    float* s = scores + i * kSplit;
    float top = kNegInf;
    int64_t next = 0;
    for (int64_t j = 0; j < kSplit; j++) { // slots that are dead for this row weigh exactly 0
      const bool is_key = next < live && keys[next] == j;
      next += is_key;
      if (!is_key || !sees[j]) s[j] = kNegInf;
      else top = std::max(top, s[j]);
    }
    b.max[i] = top;
    if (top == kNegInf) { // this row sees nothing here
      std::fill(s, s + kSplit, 0.0f);
      continue;
    }
    f32x8 total = splat(0.0f);
    for (int64_t j = 0; j < kSplit; j += kLanes) {
      const f32x8 w = exp_negative(load(s + j) - top);
      store(s + j, w);
      total += w;
    }
    b.denominator[i] = sum(total);
  }
  by_rows(b.count, [&](auto R, int64_t r) {
    for (int64_t d = 0; d < p.D; d += kPanel)
      weigh_rows<R.value>(scores + r * kSplit, v, p.v_l, keys, live, b.acc + r * p.D, p.D, d);
  });
}

// Adds a split's (acc, max, denominator) to the running ones, row by row; rows that saw nothing are left alone.
void merge(int64_t D, Block& into, const Block& part) {
  for (int64_t i = 0; i < into.count; i++) {
    if (part.max[i] == kNegInf) continue;
    if (into.max[i] == kNegInf) {
      into.max[i] = part.max[i];
      into.denominator[i] = part.denominator[i];
      std::copy(part.acc + i * D, part.acc + (i + 1) * D, into.acc + i * D);
      continue;
    }
    const float top = std::max(into.max[i], part.max[i]);
    const float a = exp_negative(into.max[i] - top), c = exp_negative(part.max[i] - top);
    into.max[i] = top;
    into.denominator[i] = into.denominator[i] * a + part.denominator[i] * c;
    for (int64_t d = 0; d < D; d += kLanes) {
      f32x8 x = load(into.acc + i * D + d) * a;
      x += load(part.acc + i * D + d) * c;
      store(into.acc + i * D + d, x);
    }
  }
}

void finish(const Problem& p, const Block& b) {
  for (int64_t i = 0; i < b.count; i++) {
    const int64_t m = (b.first + i) / p.G, h = b.kv * p.G + (b.first + i) % p.G;
    float* out = p.out + h * p.out_h + m * p.out_m;
    const float inverse = b.denominator[i] > 0.0f ? 1.0f / b.denominator[i] : 0.0f; // sees nothing: zeros
    for (int64_t d = 0; d < p.D; d++) out[d] = b.acc[i * p.D + d] * inverse;
  }
}

void run(const Problem& p) {
  const int64_t splits = (p.L + kSplit - 1) / kSplit;
  const int64_t blocks_per_head = (p.M * p.G + kRowBlock - 1) / kRowBlock, blocks = p.KV * blocks_per_head;
  const int64_t state = kRowBlock * (2 * p.D + 2);
  // One state a (block, split): splits run on any thread, and are merged in ascending order afterwards.
  const int64_t wave = std::max<int64_t>(1, std::min<int64_t>(blocks, (int64_t{1} << 22) / (splits * state) + 1));
  std::unique_ptr<float[]> memory(new float[wave * splits * state]);
  for (int64_t base = 0; base < blocks; base += wave) {
    const int64_t now = std::min(wave, blocks - base);
    auto block = [&](int64_t index, int64_t split) {
      Block b;
      b.kv = (base + index) / blocks_per_head;
      b.first = (base + index) % blocks_per_head * kRowBlock;
      b.count = std::min(kRowBlock, p.M * p.G - b.first);
      float* at = memory.get() + (index * splits + split) * state;
      b.q = at;
      b.acc = at + kRowBlock * p.D;
      b.max = at + 2 * kRowBlock * p.D;
      b.denominator = b.max + kRowBlock;
      return b;
    };
#pragma omp parallel
    {
      std::vector<float> scores(kRowBlock * kSplit);
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < now * splits; task++) {
        Block b = block(task / splits, task % splits);
        start(p, b);
        attend(p, b, task % splits, scores.data());
      }
#pragma omp for schedule(static)
      for (int64_t index = 0; index < now; index++) {
        Block total = block(index, 0);
        for (int64_t split = 1; split < splits; split++) merge(p.D, total, block(index, split));
        finish(p, total);
      }
    }
  }
}

// Both operators: q [1, H, M, D], k and v [1, KV, >= L, D], mask [M, L] -> out [1, H, M, D].
AOTITorchError attention(
    const View& q, const View& k, const View& v, const bool* mask, int64_t mask_m, int64_t L, double scale,
    AtenTensorHandle* out) {
  Problem p;
  p.M = q.sizes[2];
  p.H = q.sizes[1];
  p.D = q.sizes[3];
  p.KV = k.sizes[1];
  p.G = p.H / p.KV;
  p.L = L;
  if (p.D % kPanel) return AOTI_TORCH_FAILURE;
  // [1, M, H, D] in memory, so that the projection that follows reads it as rows
  const int64_t sizes[4] = {1, p.H, p.M, p.D}, strides[4] = {p.M * p.H * p.D, p.D, p.H * p.D, 1};
  if (new_f32(4, sizes, strides, out)) return AOTI_TORCH_FAILURE;
  void* data = nullptr;
  if (aoti_torch_get_data_ptr(*out, &data)) return AOTI_TORCH_FAILURE;
  p.q = q.as<const float>();
  p.k = k.as<const float>();
  p.v = v.as<const float>();
  p.mask = mask;
  p.out = static_cast<float*>(data);
  p.q_h = q.strides[1];
  p.q_m = q.strides[2];
  p.k_h = k.strides[1];
  p.k_l = k.strides[2];
  p.v_h = v.strides[1];
  p.v_l = v.strides[2];
  p.mask_m = mask_m;
  p.out_h = p.D;
  p.out_m = p.H * p.D;
  p.scale = static_cast<float>(scale);
  run(p);
  return AOTI_TORCH_SUCCESS;
}

bool four_dimensions(const View& v) {
  return v.ndim == 4 && v.row_major();
}

} // namespace
} // namespace eyas

extern "C" AOTITorchError aoti_torch_cpu_masked_sdpa(
    AtenTensorHandle q_handle, AtenTensorHandle k_handle, AtenTensorHandle v_handle, AtenTensorHandle mask_handle,
    double scale, AtenTensorHandle* out) {
  eyas::View q, k, v, mask;
  if (eyas::view(q_handle, q) || eyas::view(k_handle, k) || eyas::view(v_handle, v) || eyas::view(mask_handle, mask))
    return AOTI_TORCH_FAILURE;
  if (!eyas::four_dimensions(q) || !eyas::four_dimensions(k) || !eyas::four_dimensions(v) || mask.ndim != 2 ||
      !mask.row_major())
    return AOTI_TORCH_FAILURE;
  return eyas::attention(q, k, v, mask.as<const bool>(), mask.strides[0], k.sizes[2], scale, out);
}

// The mask follows from the positions, and keys past the last of them are not looked at.
extern "C" AOTITorchError aoti_torch_cpu_sdpa_midm(
    AtenTensorHandle q_handle, AtenTensorHandle k_handle, AtenTensorHandle v_handle, AtenTensorHandle pos_handle,
    double scale, AtenTensorHandle* out) {
  eyas::View q, k, v, pos;
  if (eyas::view(q_handle, q) || eyas::view(k_handle, k) || eyas::view(v_handle, v) || eyas::view(pos_handle, pos))
    return AOTI_TORCH_FAILURE;
  if (!eyas::four_dimensions(q) || !eyas::four_dimensions(k) || !eyas::four_dimensions(v) || pos.ndim != 1 ||
      pos.sizes[0] != q.sizes[2])
    return AOTI_TORCH_FAILURE;
  const int64_t M = q.sizes[2], step = pos.strides[0];
  const int64_t* at = pos.as<const int64_t>();
  int64_t live = 0;
  for (int64_t m = 0; m < M; m++) live = std::max(live, at[m * step] + 1);
  if (live > k.sizes[2]) return AOTI_TORCH_FAILURE;
  std::unique_ptr<bool[]> mask(new bool[M * live + 1]);
  for (int64_t m = 0; m < M; m++)
    for (int64_t j = 0; j < live; j++) mask[m * live + j] = j <= at[m * step];
  return eyas::attention(q, k, v, mask.get(), live, live, scale, out);
}
