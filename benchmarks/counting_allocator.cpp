// Counts the bytes that torch's CPU allocator has given out, whichever thread asks and whichever gives back.
//
// Loaded into a process that has imported torch; every allocation from then on comes from here. Torch's profiler counts
// too, but only in threads that it watches: what gloo's threads take or give back it never hears of.

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include <c10/core/CPUAllocator.h>

namespace {

constexpr size_t ALIGNMENT = 64;  // as torch aligns; the size of an allocation stands in as many bytes before it

std::atomic<int64_t> now{0};
std::atomic<int64_t> most{0};

void release(void* data) {
  if (data == nullptr) return;
  char* start = static_cast<char*>(data) - ALIGNMENT;
  now -= *reinterpret_cast<int64_t*>(start);
  std::free(start);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, ALIGNMENT, bytes + ALIGNMENT) == 0, "no memory for ", bytes, " bytes");
    *static_cast<int64_t*>(start) = static_cast<int64_t>(bytes);
    const int64_t living = now += static_cast<int64_t>(bytes);
    int64_t known = most;
    while (living > known && !most.compare_exchange_weak(known, living)) {
    }
    void* data = static_cast<char*>(start) + ALIGNMENT;
    return {data, data, &release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

CountingAllocator allocator;

}  // namespace

extern "C" {
void start_counting() {
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
}
int64_t living_bytes() {
  return now;
}
int64_t most_bytes() {
  return most;
}
void forget_most() {
  most = now.load();
}
}
