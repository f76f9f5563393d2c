// Runs the target on the files of a corpus and on mutations of them. Needs no libFuzzer: with
// -fsanitize-coverage=trace-pc, inputs that reach new code are mutated in turn.
//
// usage: decoders [rounds=N] [seconds=N] [seed=N] [findings=FOLDER] CORPUS…
//
// An input must not crash, hang, or allocate much more memory than it has bytes. Allocations are not counted under
// AddressSanitizer, which replaces malloc.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

// Limit on allocations per input byte: see ObjectBudget. Parsing turns bytes into objects, then objects into tensors.
constexpr uint64_t kPerByte = 512;
constexpr uint64_t kFree = 2 << 20;
constexpr unsigned kPatienceSeconds = 20;

const Bytes* current = nullptr;
std::string findings;
volatile bool counting = false;
uint64_t asked_for = 0;

void Keep(const char* what) {
  counting = false;
  if (current == nullptr) return;
  const std::string path = findings + "/decoders-" + what;
  const int file = open(path.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0644);
  if (file >= 0 && write(file, current->data(), current->size()) >= 0) {
    std::fprintf(stderr, "fuzz: the input is in %s\n", path.c_str());
  }
  if (file >= 0) close(file);
}

void OnSignal(int signal) {
  Keep(signal == SIGALRM ? "hang" : "crash");
  ::signal(signal, SIG_DFL);
  raise(signal);
}

void Count(size_t bytes) {
  if (!counting) return;
  asked_for += bytes;
  const uint64_t allowed = kFree + kPerByte * current->size();
  if (asked_for <= allowed) return;
  Keep("memory");
  std::fprintf(stderr, "fuzz: %zu bytes of input asked for more than %llu bytes of memory\n", current->size(),
               static_cast<unsigned long long>(allowed));
  std::abort();
}

void Run(const Bytes& bytes) {
  current = &bytes;
  asked_for = 0;
  alarm(kPatienceSeconds);
  counting = true;
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  counting = false;
  alarm(0);
  current = nullptr;
}

// ---- coverage ----

constexpr size_t kPlaces = 1 << 16;
uint8_t reached[kPlaces];
bool something_new = false;

// ---- mutations ----

constexpr size_t kMaxInput = 1 << 16;

Bytes Mutated(Bytes bytes, const Bytes& other, std::mt19937_64* random) {
  const auto below = [random](uint64_t n) { return n == 0 ? 0 : (*random)() % n; };
  static constexpr uint8_t kUsual[] = {0, 1, 2, 4, 8, 0x10, 0x12, 0x15, 0x1a, 0x22, 0x7a, 0x7f, 0x80, 0xff};
  // Keep the first byte: it selects the decoder.
  for (uint64_t i = 0, n = 1 + below(4); i < n; ++i) {
    const size_t at = 1 + below(bytes.size());
    const bool inside = at < bytes.size();
    switch (below(8)) {
      case 0:
        if (inside) bytes[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:
        if (inside) bytes[at] = kUsual[below(sizeof(kUsual))];
        break;
      case 2:
        bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(std::min(at, bytes.size())), kUsual[below(sizeof(kUsual))]);
        break;
      case 3:
        if (inside) bytes.erase(bytes.begin() + static_cast<ptrdiff_t>(at));
        break;
      case 4:
        if (inside) bytes.resize(at);
        break;
      case 5: {  // a piece of another input
        if (other.size() < 2) break;
        const size_t from = 1 + below(other.size() - 1), length = 1 + below(other.size() - from);
        bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(std::min(at, bytes.size())),
                     other.begin() + static_cast<ptrdiff_t>(from),
                     other.begin() + static_cast<ptrdiff_t>(from + length));
        break;
      }
      case 6: {  // a piece of this input, repeated
        if (!inside) break;
        const size_t length = 1 + below(std::min<size_t>(64, bytes.size() - at));
        const Bytes piece(bytes.begin() + static_cast<ptrdiff_t>(at),
                          bytes.begin() + static_cast<ptrdiff_t>(at + length));
        for (uint64_t times = below(16); times > 0; --times) {
          bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(at), piece.begin(), piece.end());
        }
        break;
      }
      default:
        if (inside) bytes[at] = static_cast<uint8_t>((*random)());
    }
    if (bytes.size() > kMaxInput) bytes.resize(kMaxInput);
  }
  return bytes;
}

Bytes Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

void Collect(const std::string& path, std::vector<std::string>* files) {
  DIR* folder = opendir(path.c_str());
  if (folder == nullptr) {
    files->push_back(path);
    return;
  }
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] != '.') files->push_back(path + "/" + entry->d_name);
  }
  closedir(folder);
}

}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && defined(__GLIBC__)
// Counts every allocation in the process; TensorFlow's allocator uses these functions as well.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void* malloc(size_t size) {
  Count(size);
  return __libc_malloc(size);
}
void* calloc(size_t n, size_t size) {
  Count(n * size);
  return __libc_calloc(n, size);
}
void* realloc(void* memory, size_t size) {
  Count(size);
  return __libc_realloc(memory, size);
}
void* memalign(size_t alignment, size_t size) {
  Count(size);
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  Count(size);
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** out, size_t alignment, size_t size) {
  Count(size);
  *out = __libc_memalign(alignment, size);
  return *out == nullptr ? ENOMEM : 0;
}
}
#endif

// The compiler inserts a call at every branch of the instrumented code.
extern "C" __attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_pc() {
  const auto at = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& place = reached[(at >> 1) % kPlaces];
  if (place == 0) {
    place = 1;
    something_new = true;
  }
}

int main(int argc, char** argv) {
  uint64_t rounds = 0, seconds = 0, seed = 1;
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value = [&argument](const char* name) -> const char* {
      const size_t n = std::strlen(name);
      return argument.compare(0, n, name) == 0 ? argument.c_str() + n : nullptr;
    };
    if (const char* text = value("rounds=")) {
      rounds = std::strtoull(text, nullptr, 10);
    } else if (const char* text = value("seconds=")) {
      seconds = std::strtoull(text, nullptr, 10);
    } else if (const char* text = value("seed=")) {
      seed = std::strtoull(text, nullptr, 10);
    } else if (const char* text = value("findings=")) {
      findings = text;
    } else {
      Collect(argument, &files);
    }
  }
  if (findings.empty()) findings = ".";
  std::sort(files.begin(), files.end());
  std::vector<Bytes> inputs;
  for (const std::string& file : files) {
    inputs.push_back(Read(file));
    if (inputs.back().empty()) {
      std::fprintf(stderr, "fuzz: %s cannot be read, or is empty\n", file.c_str());
      return 2;
    }
  }
  if (inputs.size() < 10) {
    std::fprintf(stderr, "fuzz: a corpus of %zu files is none\n", inputs.size());
    return 2;
  }
  for (int signal : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGALRM}) ::signal(signal, &OnSignal);
  // Allocate what lives as long as the process (registries, pools) before counting.
  for (const Bytes& input : inputs) {
    if (input.size() > 2) LLVMFuzzerTestOneInput(input.data(), 2);
  }
  const size_t given = inputs.size();
  for (size_t i = 0; i < given; ++i) {
    std::fprintf(stderr, "fuzz: %s\n", files[i].c_str());
    Run(inputs[i]);
  }
  std::mt19937_64 random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  uint64_t runs = 0;
  while (runs < rounds || std::chrono::steady_clock::now() < end) {
    const Bytes input = Mutated(inputs[random() % inputs.size()], inputs[random() % inputs.size()], &random);
    something_new = false;
    Run(input);
    ++runs;
    if (something_new) inputs.push_back(input);
  }
  std::printf("fuzz: decoders: %zu files and %llu mutations, nothing found; %zu of them reached something new\n", given,
              static_cast<unsigned long long>(runs), inputs.size() - given);
  return 0;
}
