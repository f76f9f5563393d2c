#include "cc/executor/row_math.h"

#include <algorithm>
#include <cmath>

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
  // Of equal numbers, and of a number and NaN, the first: as std::min and std::max.
  STARWIRE_AVX_INLINE Vector Lesser(Vector a, Vector b) { return _mm256_min_ps(b, a); }
  STARWIRE_AVX_INLINE Vector Greater(Vector a, Vector b) { return _mm256_max_ps(b, a); }
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
  // Of equal numbers, and of a number and NaN, the first: as std::min and std::max.
  STARWIRE_AVX_INLINE Vector Lesser(Vector a, Vector b) { return _mm256_min_pd(b, a); }
  STARWIRE_AVX_INLINE Vector Greater(Vector a, Vector b) { return _mm256_max_pd(b, a); }
  STARWIRE_AVX_INLINE double Root(double a) {
    const __m128d value = _mm_set_sd(a);
    return _mm_cvtsd_f64(_mm_sqrt_sd(value, value));
  }
  STARWIRE_AVX_INLINE Vector InverseRoot(Vector a) { return Divide(All(1.0), Root(a)); }
};

// The same, for what remains of a row.
template <typename T>
struct Single {
  using Vector = T;
  STARWIRE_AVX_INLINE T All(T value) { return value; }
  STARWIRE_AVX_INLINE T Load(const T* from) { return *from; }
  STARWIRE_AVX_INLINE void Store(T* to, T value) { *to = value; }
  STARWIRE_AVX_INLINE T Add(T a, T b) { return a + b; }
  STARWIRE_AVX_INLINE T Subtract(T a, T b) { return a - b; }
  STARWIRE_AVX_INLINE T Multiply(T a, T b) { return a * b; }
  STARWIRE_AVX_INLINE T Divide(T a, T b) { return a / b; }
  STARWIRE_AVX_INLINE T Root(T a) { return Lanes<T>::Root(a); }
  STARWIRE_AVX_INLINE T Lesser(T a, T b) { return b < a ? b : a; }
  STARWIRE_AVX_INLINE T Greater(T a, T b) { return a < b ? b : a; }
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

template <typename L, typename T>
STARWIRE_AVX_INLINE void MomentumElements(const MomentumNumbers<T>& numbers, const T* g, T* v, T* a) {
  const auto rate = L::All(numbers.rate), momentum = L::All(numbers.momentum);
  const auto slope = L::Load(g);
  const auto sum = L::Add(L::Multiply(L::Load(a), momentum), slope);
  L::Store(a, sum);
  // In Nesterov's formula, the numbers are multiplied with each other first.
  const auto step = numbers.nesterov ? L::Add(L::Multiply(slope, rate), L::Multiply(L::Multiply(rate, momentum), sum))
                                     : L::Multiply(sum, rate);
  L::Store(v, L::Subtract(L::Load(v), step));
}

template <typename L, typename T>
STARWIRE_AVX_INLINE void KerasMomentumElements(const MomentumNumbers<T>& numbers, const T* g, T* v, T* a) {
  const auto rate = L::All(numbers.rate), momentum = L::All(numbers.momentum);
  const auto own = L::Multiply(L::Load(g), rate);
  const auto step = L::Subtract(L::Multiply(L::Load(a), momentum), own);
  L::Store(a, step);
  const auto ahead = numbers.nesterov ? L::Subtract(L::Multiply(step, momentum), own) : step;
  L::Store(v, L::Add(L::Load(v), ahead));
}

template <bool kIsOfKeras, typename T, typename Id>
STARWIRE_AVX void Momentum(const SparseRows<T, Id>& gradient, const MomentumNumbers<T>& numbers, T* table,
                           T* accumulator) {
  const int64_t width = gradient.width;
  const int64_t vectors = width - width % Lanes<T>::kCount;
  for (int64_t at = 0; at < gradient.count; ++at) {
    if (at + kAhead < gradient.count) {
      FetchRow(table, gradient.ids[at + kAhead], width);
      FetchRow(accumulator, gradient.ids[at + kAhead], width);
    }
    if (gradient.IsOthers(at)) continue;
    const int64_t row = static_cast<int64_t>(gradient.ids[at]) * width;
    const T* g = gradient.rows + at * width;
    T *v = table + row, *a = accumulator + row;
    int64_t i = 0;
    for (; i < vectors; i += Lanes<T>::kCount) {
      if (kIsOfKeras) {
        KerasMomentumElements<Lanes<T>>(numbers, g + i, v + i, a + i);
      } else {
        MomentumElements<Lanes<T>>(numbers, g + i, v + i, a + i);
      }
    }
    for (; i < width; ++i) {
      if (kIsOfKeras) {
        KerasMomentumElements<Single<T>>(numbers, g + i, v + i, a + i);
      } else {
        MomentumElements<Single<T>>(numbers, g + i, v + i, a + i);
      }
    }
  }
}

// What is the same for all elements of an update.
template <typename T>
struct FtrlConstants {
  explicit FtrlConstants(const FtrlNumbers<T>& numbers)
      : rate(numbers.rate),
        limit(numbers.scales_linear ? numbers.l1 * numbers.rate : numbers.l1),
        addend(numbers.scales_linear ? T(2) * numbers.l2 * numbers.rate : T(2) * numbers.l2),
        shrinkage(T(2) * numbers.shrinkage) {}

  T rate, limit, addend, shrinkage;
};

// Elements in rows of several.
template <typename L, typename T>
STARWIRE_AVX_INLINE void FtrlElements(const FtrlNumbers<T>& numbers, const FtrlConstants<T>& constants, const T* g,
                                      T* v, T* a, T* l) {
  const auto rate = L::All(constants.rate);
  const auto slope = L::Load(g), old = L::Load(v), sum = L::Load(a);
  const auto new_sum = L::Add(sum, L::Multiply(slope, slope));
  const auto shrunk = numbers.has_shrinkage ? L::Add(slope, L::Multiply(L::All(constants.shrinkage), old)) : slope;
  const auto root = L::Root(new_sum);
  const auto growth = L::Subtract(root, L::Root(sum));
  const auto change = numbers.scales_linear ? L::Subtract(L::Multiply(shrunk, rate), L::Multiply(growth, old))
                                            : L::Subtract(shrunk, L::Multiply(L::Divide(growth, rate), old));
  const auto line = L::Add(L::Load(l), change);
  const auto within = L::Greater(L::Lesser(line, L::All(constants.limit)), L::All(-constants.limit));
  const auto divisor = L::Add(numbers.scales_linear ? root : L::Divide(root, rate), L::All(constants.addend));
  L::Store(v, L::Divide(L::Subtract(within, line), divisor));
  L::Store(a, new_sum);
  L::Store(l, line);
}

// The element of a row of one: other operations in another order.
template <typename T>
STARWIRE_AVX_INLINE void FtrlElement(const FtrlNumbers<T>& numbers, const FtrlConstants<T>& constants, const T* g, T* v,
                                     T* a, T* l) {
  const T slope = numbers.has_shrinkage ? *g + constants.shrinkage * *v : *g;
  const T new_sum = *a + *g * *g;
  T growth = std::pow(new_sum, numbers.power) - std::pow(*a, numbers.power);
  if (!numbers.scales_linear) growth /= constants.rate;
  const T line = (numbers.scales_linear ? *l + slope * constants.rate : *l + slope) - growth * *v;
  const T root = Lanes<T>::Root(new_sum);
  const T divisor = (numbers.scales_linear ? root : root / constants.rate) + constants.addend;
  const T within = std::max(std::min(line, constants.limit), -constants.limit);
  *v = (within - line) / divisor;
  *a = new_sum;
  *l = line;
}

template <typename T, typename Id>
STARWIRE_AVX void Ftrl(const SparseRows<T, Id>& gradient, const FtrlNumbers<T>& numbers, T* table, T* accumulator,
                       T* linear) {
  const int64_t width = gradient.width;
  const int64_t vectors = width - width % Lanes<T>::kCount;
  const FtrlConstants<T> constants(numbers);
  for (int64_t at = 0; at < gradient.count; ++at) {
    if (at + kAhead < gradient.count) {
      FetchRow(table, gradient.ids[at + kAhead], width);
      FetchRow(accumulator, gradient.ids[at + kAhead], width);
      FetchRow(linear, gradient.ids[at + kAhead], width);
    }
    if (gradient.IsOthers(at)) continue;
    const int64_t row = static_cast<int64_t>(gradient.ids[at]) * width;
    const T* g = gradient.rows + at * width;
    T *v = table + row, *a = accumulator + row, *l = linear + row;
    if (width == 1) {
      FtrlElement(numbers, constants, g, v, a, l);
      continue;
    }
    int64_t i = 0;
    for (; i < vectors; i += Lanes<T>::kCount) {
      FtrlElements<Lanes<T>>(numbers, constants, g + i, v + i, a + i, l + i);
    }
    for (; i < width; ++i) FtrlElements<Single<T>>(numbers, constants, g + i, v + i, a + i, l + i);
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
  Momentum<false>(gradient, numbers, table, accumulator);
}

template <typename T, typename Id>
void ApplyKerasMomentum(const SparseRows<T, Id>& gradient, const MomentumNumbers<T>& numbers, T* table,
                        T* accumulator) {
  Momentum<true>(gradient, numbers, table, accumulator);
}

template <typename T, typename Id>
void ApplyFtrl(const SparseRows<T, Id>& gradient, const FtrlNumbers<T>& numbers, T* table, T* accumulator, T* linear) {
  Ftrl(gradient, numbers, table, accumulator, linear);
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
void ApplyKerasMomentum(const SparseRows<T, Id>&, const MomentumNumbers<T>&, T*, T*) {}

template <typename T, typename Id>
void ApplyFtrl(const SparseRows<T, Id>&, const FtrlNumbers<T>&, T*, T*, T*) {}

template <typename T, typename Id>
void ScatterRows(const SparseRows<T, Id>&, Sign, T*) {}

#endif

#define STARWIRE_ROW_MATH(T, Id)                                                                 \
  template void ApplyAdagrad(const SparseRows<T, Id>&, const AdagradNumbers<T>&, T*, T*);        \
  template void ApplyMomentum(const SparseRows<T, Id>&, const MomentumNumbers<T>&, T*, T*);      \
  template void ApplyKerasMomentum(const SparseRows<T, Id>&, const MomentumNumbers<T>&, T*, T*); \
  template void ApplyFtrl(const SparseRows<T, Id>&, const FtrlNumbers<T>&, T*, T*, T*);          \
  template void ScatterRows(const SparseRows<T, Id>&, Sign, T*)

STARWIRE_ROW_MATH(float, int32_t);
STARWIRE_ROW_MATH(float, long);
STARWIRE_ROW_MATH(float, long long);
STARWIRE_ROW_MATH(double, int32_t);
STARWIRE_ROW_MATH(double, long);
STARWIRE_ROW_MATH(double, long long);

}  // namespace starwire
