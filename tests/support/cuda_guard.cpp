// Has torch's CPU build take "cuda" for a device that exists, so that fake tensors can be on it (tests/support/rehearsal.py).
//
// A fake tensor computes nothing and owns no memory. What torch still asks before it lets one be on a GPU is answered
// here: that there is one device, that it is the current one, and that its work is all in one stream. Nothing real can
// run on it: there are no kernels, no memory, no random numbers.
//
// Loaded before torch is imported, because torch asks once and remembers the answers.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

namespace {

const c10::Device the_device(c10::DeviceType::CUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override {
    return the_device;
  }
  c10::Device getDevice() const override {
    return the_device;
  }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, the_device);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return c10::Stream(c10::Stream::DEFAULT, the_device);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, the_device);
  }
};

// Gives out ordinary memory, and remembers that it was asked for as pinned. Nothing is given back: it is little.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    const std::lock_guard<std::mutex> lock(mutex);
    pieces.emplace_back(static_cast<char*>(memory), bytes);
    return {memory, c10::Device(c10::DeviceType::CPU)};
  }
  bool has(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [first, bytes] : pieces) {
      if (address >= first && address < first + bytes) {
        return true;
      }
    }
    return false;
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  std::mutex mutex;
  std::vector<std::pair<char*, size_t>> pieces;
};

PinnedMemory pinned_memory;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex current_device() const override {
    return 0;
  }
  int getNumGPUs() const override {
    return 1;
  }
  // Pinned memory is what was asked for as such: ordinary memory whose addresses are remembered.
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  bool isPinnedPtr(const void* address) const override {
    return pinned_memory.has(address);
  }
};

} // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
} // namespace c10::impl

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks) // torch looks for this very name
} // namespace at
