#include "cc/worker/advertisement.h"

namespace starwire {
namespace {

constexpr char kOpen[] = "starwire{";
constexpr char kClose = '}';

}  // namespace

void AddAdvertisement(const std::string& advertisement, tensorflow::GetStatusResponse* response) {
  if (advertisement.empty()) return;
  for (auto& device : *response->mutable_device_attributes()) {
    if (device.device_type() != "CPU") continue;
    std::string* text = device.mutable_physical_device_desc();
    if (!text->empty()) text->push_back(' ');
    text->append(kOpen).append(advertisement).push_back(kClose);
    return;
  }
}

std::string FindAdvertisement(const tensorflow::GetStatusResponse& response) {
  for (const auto& device : response.device_attributes()) {
    const std::string& text = device.physical_device_desc();
    const size_t open = text.find(kOpen);
    if (open == std::string::npos) continue;
    const size_t begin = open + sizeof(kOpen) - 1;
    const size_t end = text.find(kClose, begin);
    if (end != std::string::npos) return text.substr(begin, end - begin);
  }
  return std::string();
}

}  // namespace starwire
