#include "cc/star/feed_sizes.h"

#include <algorithm>
#include <utility>

#include "tensorflow/core/framework/types.h"

namespace starwire {

namespace {

constexpr size_t kMaxSizes = 4;
constexpr int64_t kGrowth = 2;

bool Covers(const FeedSize& known, const FeedSize& size) {
  if (known.size() != size.size()) return false;
  for (size_t i = 0; i < size.size(); ++i) {
    const bool fits = size[i] < 0 ? size[i] == known[i] : size[i] <= std::max<int64_t>(known[i], 1) * kGrowth;
    if (!fits || (known[i] < 0) != (size[i] < 0)) return false;
  }
  return true;
}

}  // namespace

FeedSize SizeOf(const std::vector<tensorflow::Tensor>& feeds) {
  FeedSize size;
  size.reserve(feeds.size() * 3 + 1);
  int64_t text = 0;
  for (const tensorflow::Tensor& feed : feeds) {
    if (feed.dtype() == tensorflow::DT_VARIANT) return {};
    // The number of dimensions is negative, to be told from a dimension.
    size.push_back(-1 - feed.dims());
    for (int i = 0; i < feed.dims(); ++i) size.push_back(feed.dim_size(i));
    if (feed.dtype() == tensorflow::DT_STRING) text += static_cast<int64_t>(feed.TotalBytes());
  }
  size.push_back(text);
  return size;
}

bool FeedSizes::Cover(const FeedSize& size) const {
  if (size.empty()) return false;
  const std::lock_guard<std::mutex> locked(lock_);
  return std::any_of(sizes_.begin(), sizes_.end(), [&](const FeedSize& known) { return Covers(known, size); });
}

void FeedSizes::Add(FeedSize size) {
  if (size.empty()) return;
  const std::lock_guard<std::mutex> locked(lock_);
  if (sizes_.size() < kMaxSizes) {
    sizes_.push_back(std::move(size));
  } else {
    sizes_[next_++ % kMaxSizes] = std::move(size);
  }
}

}  // namespace starwire
