#include "cc/executor/row_math.h"

#ifdef __x86_64__
#include <immintrin.h>

#include "tensorflow/core/platform/cpu_info.h"

// The wheels' kernels are compiled for AVX without fused multiply-add, so nothing here may use more: these attributes,
// unlike compiler flags, also keep the instructions out of every other function.
#define STARWIRE_AVX __attribute__((target("avx")))
#define STARWIRE_AVX_INLINE __attribute__((target("avx"), always_inline)) static inline
#endif

namespace starwire {

#ifdef __x86_64__

namespace {

template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
  using Vector = __m256;
  static constexpr int64_t kCount = 8;
  STARWIRE_AVX_INLINE Vector All(float value) { return _mm256_set1_ps(value); }
  STARWIRE_AVX_INLINE Vector Load(const float* from) { return _mm256_loadu_ps(from); }
  STARWIRE_AVX_INLINE void Store(float* to, Vector value) { _mm256_storeu_ps(to, value); }
  STARWIRE_AVX_INLINE Vector Add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  STARWIRE_AVX_INLINE Vector Subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  STARWIRE_AVX_INLINE Vector Multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  STARWIRE_AVX_INLINE Vector Divide(Vector a, Vector b) { return _mm256_div_ps(a, b); }
  STARWIRE_AVX_INLINE Vector Root(Vector a) { return _mm256_sqrt_ps(a); }
  STARWIRE_AVX_INLINE float Root(float a) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(a))); }
  // The processor's estimate and one step of Newton's iteration, which makes NaN of zeros and infinities.
  STARWIRE_AVX_INLINE Vector InverseRoot(Vector a) {
    const Vector estimate = _mm256_rsqrt_ps(a);
    const Vector half = Multiply(estimate, All(-0.5f));
    const Vector error = Add(Multiply(Multiply(a, estimate), estimate), All(-1.0f));
    const Vector better = Add(Multiply(half, error), estimate);
    return _mm256_blendv_ps(better, estimate, _mm256_cmp_ps(better, better, _CMP_UNORD_Q));
  }
};

template <>
struct Lanes<double> {
  using Vector = __m256d;
  static constexpr int64_t kCount = 4;
  STARWIRE_AVX_INLINE Vector All(double value) { return _mm256_set1_pd(value); }
  STARWIRE_AVX_INLINE Vector Load(const double* from) { return _mm256_loadu_pd(from); }
  STARWIRE_AVX_INLINE void Store(double* to, Vector value) { _mm256_storeu_pd(to, value); }
  STARWIRE_AVX_INLINE Vector Add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
  STARWIRE_AVX_INLINE Vector Subtract(Vector a, Vector b) { return _mm256_sub_pd(a, b); }
  STARWIRE_AVX_INLINE Vector Multiply(Vector a, Vector b) { return _mm256_mul_pd(a, b); }
  STARWIRE_AVX_INLINE Vector Divide(Vector a, Vector b) { return _mm256_div_pd(a, b); }
  STARWIRE_AVX_INLINE Vector Root(Vector a) { return _mm256_sqrt_pd(a); }
  STARWIRE_AVX_INLINE double Root(double a) {
    const __m128d value = _mm_set_sd(a);
    return _mm_cvtsd_f64(_mm_sqrt_sd(value, value));
  }
  STARWIRE_AVX_INLINE Vector InverseRoot(Vector a) { return Divide(All(1.0), Root(a)); }
};

// Rows that are used soon. Those of a batch lie anywhere in a table, so that the processor does not foresee them.
constexpr int64_t kAhead = 8;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kLongestFetch = 4 * kLineBytes;

template <typename T>
STARWIRE_AVX_INLINE void FetchRow(const T* table, int64_t row, int64_t width) {
  const char* from = reinterpret_cast<const char*>(table + row * width);
  const int64_t bytes = width * static_cast<int64_t>(sizeof(T));
  for (int64_t at = 0; at < bytes && at < kLongestFetch; at += kLineBytes) __builtin_prefetch(from + at, 1);
}

template <typename T, typename Id>
STARWIRE_AVX void Adagrad(const SparseRows<T, Id>& gradient, const AdagradNumbers<T>& numbers, T* table,
                          T* accumulator) {
  using L = Lanes<T>;
  const int64_t width = gradient.width;
  // A row of one element has another formula without epsilon.
  const int64_t vectors = width == 1 ? 0 : width - width % L::kCount;
  const auto rate = L::All(numbers.rate);
  const auto epsilon = L::All(numbers.epsilon);
  for (int64_t at = 0; at < gradient.count; ++at) {
    if (at + kAhead < gradient.count) {
      FetchRow(table, gradient.ids[at + kAhead], width);
      FetchRow(accumulator, gradient.ids[at + kAhead], width);
    }
    if (gradient.IsOthers(at)) continue;
    const T* g = gradient.rows + at * width;
    T* v = table + static_cast<int64_t>(gradient.ids[at]) * width;
    T* a = accumulator + static_cast<int64_t>(gradient.ids[at]) * width;
    for (int64_t i = 0; i < vectors; i += L::kCount) {
      const auto slope = L::Load(g + i);
      auto sum = L::Load(a + i);
      if (numbers.updates_slot) {
        sum = L::Add(sum, L::Multiply(slope, slope));
        L::Store(a + i, sum);
      }
      const auto scaled = L::Multiply(rate, slope);
      const auto step = numbers.has_epsilon ? L::Divide(scaled, L::Add(L::Root(sum), epsilon))
                                            : L::Multiply(scaled, L::InverseRoot(sum));
      L::Store(v + i, L::Subtract(L::Load(v + i), step));
    }
    for (int64_t i = vectors; i < width; ++i) {
      if (numbers.updates_slot) a[i] += g[i] * g[i];
      const T scaled = numbers.rate * g[i];
      if (numbers.has_epsilon) {
        v[i] -= scaled / (L::Root(a[i]) + numbers.epsilon);
      } else if (width == 1) {
        v[i] -= scaled / L::Root(a[i]);
      } else {
        v[i] -= scaled * (T(1) / L::Root(a[i]));
      }
    }
  }
}

template <typename T, typename Id>
STARWIRE_AVX void Momentum(const SparseRows<T, Id>& gradient, const MomentumNumbers<T>& numbers, T* table,
                           T* accumulator) {
  using L = Lanes<T>;
  const int64_t width = gradient.width;
  const int64_t vectors = width - width % L::kCount;
  const auto rate = L::All(numbers.rate);
  const auto momentum = L::All(numbers.momentum);
  for (int64_t at = 0; at < gradient.count; ++at) {
    if (at + kAhead < gradient.count) {
      FetchRow(table, gradient.ids[at + kAhead], width);
      FetchRow(accumulator, gradient.ids[at + kAhead], width);
    }
    if (gradient.IsOthers(at)) continue;
    const T* g = gradient.rows + at * width;
    T* v = table + static_cast<int64_t>(gradient.ids[at]) * width;
    T* a = accumulator + static_cast<int64_t>(gradient.ids[at]) * width;
    for (int64_t i = 0; i < vectors; i += L::kCount) {
      const auto sum = L::Add(L::Multiply(L::Load(a + i), momentum), L::Load(g + i));
      L::Store(a + i, sum);
      L::Store(v + i, L::Subtract(L::Load(v + i), L::Multiply(sum, rate)));
    }
    for (int64_t i = vectors; i < width; ++i) {
      a[i] = a[i] * numbers.momentum + g[i];
      v[i] -= a[i] * numbers.rate;
    }
  }
}

template <Sign kSign, typename T, typename Id>
STARWIRE_AVX void Scatter(const SparseRows<T, Id>& updates, T* table) {
  using L = Lanes<T>;
  const int64_t width = updates.width;
  const int64_t vectors = width - width % L::kCount;
  for (int64_t at = 0; at < updates.count; ++at) {
    if (at + kAhead < updates.count) FetchRow(table, updates.ids[at + kAhead], width);
    if (updates.IsOthers(at)) continue;
    const T* u = updates.rows + at * width;
    T* v = table + static_cast<int64_t>(updates.ids[at]) * width;
    for (int64_t i = 0; i < vectors; i += L::kCount) {
      const auto old = L::Load(v + i), change = L::Load(u + i);
      L::Store(v + i, kSign == Sign::kAdd ? L::Add(old, change) : L::Subtract(old, change));
    }
    for (int64_t i = vectors; i < width; ++i) v[i] = kSign == Sign::kAdd ? v[i] + u[i] : v[i] - u[i];
  }
}

}  // namespace

bool HasRowMath() { return tensorflow::port::TestCPUFeature(tensorflow::port::CPUFeature::AVX); }

template <typename T, typename Id>
void ApplyAdagrad(const SparseRows<T, Id>& gradient, const AdagradNumbers<T>& numbers, T* table, T* accumulator) {
  Adagrad(gradient, numbers, table, accumulator);
}

template <typename T, typename Id>
void ApplyMomentum(const SparseRows<T, Id>& gradient, const MomentumNumbers<T>& numbers, T* table, T* accumulator) {
  Momentum(gradient, numbers, table, accumulator);
}

template <typename T, typename Id>
void ScatterRows(const SparseRows<T, Id>& updates, Sign sign, T* table) {
  if (sign == Sign::kAdd) {
    Scatter<Sign::kAdd>(updates, table);
  } else {
    Scatter<Sign::kSubtract>(updates, table);
  }
}

#else

bool HasRowMath() { return false; }

template <typename T, typename Id>
void ApplyAdagrad(const SparseRows<T, Id>&, const AdagradNumbers<T>&, T*, T*) {}

template <typename T, typename Id>
void ApplyMomentum(const SparseRows<T, Id>&, const MomentumNumbers<T>&, T*, T*) {}

template <typename T, typename Id>
void ScatterRows(const SparseRows<T, Id>&, Sign, T*) {}

#endif

#define STARWIRE_ROW_MATH(T, Id)                                                            \
  template void ApplyAdagrad(const SparseRows<T, Id>&, const AdagradNumbers<T>&, T*, T*);   \
  template void ApplyMomentum(const SparseRows<T, Id>&, const MomentumNumbers<T>&, T*, T*); \
  template void ScatterRows(const SparseRows<T, Id>&, Sign, T*)

STARWIRE_ROW_MATH(float, int32_t);
STARWIRE_ROW_MATH(float, long);
STARWIRE_ROW_MATH(float, long long);
STARWIRE_ROW_MATH(double, int32_t);
STARWIRE_ROW_MATH(double, long);
STARWIRE_ROW_MATH(double, long long);

}  // namespace starwire
