// The functions that the compiler's vector code takes from Sleef, which otherwise only torch's library has.
//
// Names and argument types are Sleef's. Errors, in units in the last place: exp 1.0, tanh 1.5, sin and cos 2.0 (Sleef's
// own u10 promises 1.0). Linked statically into each method, so a program does not depend on who runs it.

#include "panels.h"

#if defined(__AVX2__)

namespace eyas {
namespace {

typedef double f64x4 __attribute__((vector_size(32)));
typedef int64_t i64x4 __attribute__((vector_size(32)));

inline f32x8 choose(i32x8 condition, f32x8 yes, f32x8 no) {
  return (f32x8)(((i32x8)yes & condition) | ((i32x8)no & ~condition));
}

inline f32x8 absolute(f32x8 x) {
  return (f32x8)((i32x8)x & 0x7fffffff);
}

inline f32x8 with_sign_of(f32x8 magnitude, f32x8 x) {
  return (f32x8)((i32x8)magnitude | ((i32x8)x & (int32_t)0x80000000));
}

// 2^n * p(r), |r| <= ln(2)/2; the power of two is applied in two steps, so that results down to denormals come out.
inline f32x8 exponential(f32x8 x) {
  const f32x8 high = splat(89.0f), low = splat(-104.0f);
  f32x8 y = choose(x > high, high, x);
  y = choose(y < low, low, y);
  const f32x8 magic = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to the nearest integer
  const f32x8 shifted = y * 1.44269504088896341f + magic;
  const f32x8 n = shifted - magic;
  f32x8 r = y - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  f32x8 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const i32x8 exponent = (i32x8)shifted - (i32x8)magic, half = exponent >> 1;
  const f32x8 value = p * (f32x8)((half + 127) << 23) * (f32x8)((exponent - half + 127) << 23);
  return choose(x != x, x, value);
}

inline f32x8 hyperbolic_tangent(f32x8 x) {
  const f32x8 a = absolute(x), square = x * x;
  f32x8 p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const f32x8 near_zero = x + x * square * p;
  const f32x8 far = with_sign_of(1.0f - 2.0f / (exponential(a + a) + 1.0f), x);
  return choose(x != x, x, choose(a < splat(0.625f), near_zero, far));
}

// The quadrant and the remainder of an angle, in double precision: exact enough for any position that a cache holds.
struct Reduced {
  f32x8 r;
  i32x8 quadrant;
};

inline Reduced reduce(f32x8 x) {
  Reduced out;
  for (int half = 0; half < 2; half++) {
    f64x4 d;
    for (int i = 0; i < 4; i++) d[i] = x[4 * half + i];
    const f64x4 magic = {6755399441055744.0, 6755399441055744.0, 6755399441055744.0, 6755399441055744.0}; // 1.5 * 2^52
    const f64x4 shifted = d * 0.63661977236758134308 + magic; // 2 / pi
    const f64x4 n = shifted - magic;
    f64x4 r = d - n * 1.57079632679489655800;
    r = r - n * 6.12323399573676603587e-17;
    const i64x4 q = (i64x4)shifted - (i64x4)magic;
    for (int i = 0; i < 4; i++) {
      out.r[4 * half + i] = static_cast<float>(r[i]);
      out.quadrant[4 * half + i] = static_cast<int32_t>(q[i]);
    }
  }
  return out;
}

inline f32x8 sine_of(f32x8 r) { // |r| <= pi / 4
  const f32x8 square = r * r;
  f32x8 p = splat(-1.9515295891e-4f);
  p = p * square + 8.3321608736e-3f;
  p = p * square - 1.6666654611e-1f;
  return r + r * square * p;
}

inline f32x8 cosine_of(f32x8 r) {
  const f32x8 square = r * r;
  f32x8 p = splat(2.443315711809948e-5f);
  p = p * square - 1.388731625493765e-3f;
  p = p * square + 4.166664568298827e-2f;
  return 1.0f - 0.5f * square + square * square * p;
}

// sin(x + shift * pi / 2)
inline f32x8 sine(f32x8 x, int32_t shift) {
  const Reduced a = reduce(x);
  const i32x8 q = a.quadrant + shift;
  const f32x8 value = choose((q & 1) != 0, cosine_of(a.r), sine_of(a.r));
  return (f32x8)((i32x8)value ^ ((q & 2) << 30));
}

} // namespace
} // namespace eyas

extern "C" {

__m256 Sleef_expf8_u10(__m256 x) { return (__m256)eyas::exponential((eyas::f32x8)x); }
__m256 Sleef_tanhf8_u10(__m256 x) { return (__m256)eyas::hyperbolic_tangent((eyas::f32x8)x); }
__m256 Sleef_sinf8_u10(__m256 x) { return (__m256)eyas::sine((eyas::f32x8)x, 0); }
__m256 Sleef_sinf8_u35(__m256 x) { return (__m256)eyas::sine((eyas::f32x8)x, 0); }
__m256 Sleef_cosf8_u10(__m256 x) { return (__m256)eyas::sine((eyas::f32x8)x, 1); }
__m256 Sleef_cosf8_u35(__m256 x) { return (__m256)eyas::sine((eyas::f32x8)x, 1); }

} // extern "C"

#endif // __AVX2__
