// The sizes of the feeds with which a plan was measured to be cheap.
#ifndef STARWIRE_CC_STAR_FEED_SIZES_H_
#define STARWIRE_CC_STAR_FEED_SIZES_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "tensorflow/core/framework/tensor.h"

namespace starwire {

// The number of dimensions and the dimensions of each feed, then the bytes of all strings. Empty: the size of a feed is
// not known.
using FeedSize = std::vector<int64_t>;

FeedSize SizeOf(const std::vector<tensorflow::Tensor>& feeds);

class FeedSizes {
 public:
  // No dimension is more than twice that of one of the sizes here: where costs are products of dimensions, they are a
  // few times those of that run.
  bool Cover(const FeedSize& size) const;
  // The last few are kept.
  void Add(FeedSize size);

 private:
  mutable std::mutex lock_;
  std::vector<FeedSize> sizes_;
  size_t next_ = 0;
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_FEED_SIZES_H_
