// The arithmetic of sparse updates, with the bits of TensorFlow's kernels: the same operations on each element, in the
// same order. Only how a row is split into vectors is ours to choose, except where an element's value depends on it:
// Eigen approximates reciprocal square roots within whole vectors, and computes them exactly in the rest of a row.
#ifndef STARWIRE_CC_EXECUTOR_ROW_MATH_H_
#define STARWIRE_CC_EXECUTOR_ROW_MATH_H_

#include <cstdint>

namespace starwire {

// Whether this processor has the instructions that the functions below use. They are not called without.
bool HasRowMath();

// The rows of a sparse gradient or update: row `i` belongs to row `ids[i]` of the tables. All ids are valid.
template <typename T, typename Id>
struct SparseRows {
  const T* rows;
  const Id* ids;
  int64_t count;
  int64_t width;  // elements of a row

  // Only the ids that are `part` modulo `parts`: parts may be worked on at the same time, and each row of a table still
  // gets its updates in order.
  int64_t part = 0, parts = 1;

  bool IsOthers(int64_t at) const { return parts > 1 && static_cast<int64_t>(ids[at]) % parts != part; }
};

template <typename T>
struct AdagradNumbers {
  T rate;
  T epsilon;          // of version 2
  bool has_epsilon;   // version 2
  bool updates_slot;  // else the accumulator stays as it is
};

// T: float, double. Id: int32_t, int64_t. The tables do not overlap each other or the rows.
template <typename T, typename Id>
void ApplyAdagrad(const SparseRows<T, Id>& gradient, const AdagradNumbers<T>& numbers, T* table, T* accumulator);

template <typename T>
struct MomentumNumbers {
  T rate;
  T momentum;
  bool nesterov;
};

template <typename T, typename Id>
void ApplyMomentum(const SparseRows<T, Id>& gradient, const MomentumNumbers<T>& numbers, T* table, T* accumulator);

// The accumulator contains steps instead of sums of gradients.
template <typename T, typename Id>
void ApplyKerasMomentum(const SparseRows<T, Id>& gradient, const MomentumNumbers<T>& numbers, T* table, T* accumulator);

template <typename T>
struct FtrlNumbers {
  T rate;
  T l1;
  T l2;
  T shrinkage;         // of version 2
  T power;             // one half; TensorFlow raises rows of one element to it, and takes roots of all others
  bool has_shrinkage;  // version 2
  bool scales_linear;  // the linear table is multiplied by the rate
};

template <typename T, typename Id>
void ApplyFtrl(const SparseRows<T, Id>& gradient, const FtrlNumbers<T>& numbers, T* table, T* accumulator, T* linear);

enum class Sign { kAdd, kSubtract };

// Adds the rows to those of the table, or subtracts them.
template <typename T, typename Id>
void ScatterRows(const SparseRows<T, Id>& updates, Sign sign, T* table);

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_ROW_MATH_H_
