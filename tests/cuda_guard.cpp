// Has torch's CPU build take "cuda" for a device that exists, so that fake tensors can be on it (tests/rehearsal.py).
//
// A fake tensor computes nothing and owns no memory. What torch still asks before it lets one be on a GPU is answered
// here: that there is one device, that it is the current one, and that its work is all in one stream. Nothing real can
// run on it: there are no kernels, no memory, no random numbers.
//
// Loaded before torch is imported, because torch asks once and remembers the answers.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

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
};

} // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
} // namespace c10::impl

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks) // torch looks for this very name
} // namespace at
